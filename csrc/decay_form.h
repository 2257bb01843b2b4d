// What the rest of the core asks of a decay form, so that it need not name one.
#pragma once

#include "fulmen.h"

namespace fulmen {

inline bool is_decay_form(int64_t form) { return form >= FULMEN_DECAY_NONE && form <= FULMEN_DECAY_CHANNEL; }
inline bool decays(int64_t form) { return form != FULMEN_DECAY_NONE; }
// Whether it differs from token to token.
inline bool has_tokens(int64_t form) { return form == FULMEN_DECAY_TOKEN || form == FULMEN_DECAY_CHANNEL; }
inline bool by_channel(int64_t form) { return form == FULMEN_DECAY_CHANNEL; }

}  // namespace fulmen
