// Whether a call's struct makes sense; a kernel may rely on all of it.
#pragma once

#include "fulmen.h"

namespace fulmen {

int64_t invalid(const fulmen_attention_forward_call *call);  // FULMEN_OK or what is wrong
int64_t invalid(const fulmen_attention_backward_call *call);
int64_t invalid(const fulmen_states_forward_call *call);
int64_t invalid(const fulmen_states_backward_call *call);
int64_t invalid(const fulmen_step_call *call);
int64_t invalid(const fulmen_tpa_decode_call *call);
int64_t invalid(const fulmen_output_gate_forward_call *call);
int64_t invalid(const fulmen_output_gate_backward_call *call);

}  // namespace fulmen
