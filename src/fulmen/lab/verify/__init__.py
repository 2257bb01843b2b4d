"""`fulmen verify`: whether the operators do on this machine what they promise. Needs no test folder."""
