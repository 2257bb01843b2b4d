// What one ISA build offers to the dispatcher.
#pragma once

#include "fulmen.h"

namespace fulmen {

struct Kernels {
    int64_t (*attention_forward)(const fulmen_attention_forward_call &);
    int64_t (*attention_backward)(const fulmen_attention_backward_call &);
    int64_t (*states_forward)(const fulmen_states_forward_call &);
    int64_t (*states_backward)(const fulmen_states_backward_call &);
    int64_t (*step)(const fulmen_step_call &);
    int64_t (*attention_forward_workspace)(const fulmen_attention_forward_call &);
    int64_t (*attention_backward_workspace)(const fulmen_attention_backward_call &);
    int64_t (*states_forward_workspace)(const fulmen_states_forward_call &);
    int64_t (*states_backward_workspace)(const fulmen_states_backward_call &);
    int64_t (*fma_burst)(int64_t rounds);
    int64_t (*tpa_decode)(const fulmen_tpa_decode_call &);
    int64_t (*tpa_decode_workspace)(const fulmen_tpa_decode_call &);
    int64_t (*output_gate_forward)(const fulmen_output_gate_forward_call &);
    int64_t (*output_gate_backward)(const fulmen_output_gate_backward_call &);
    int64_t (*output_gate_forward_workspace)(const fulmen_output_gate_forward_call &);
    int64_t (*output_gate_backward_workspace)(const fulmen_output_gate_backward_call &);
};

#ifdef FULMEN_ISA
namespace FULMEN_ISA {
int64_t attention_forward(const fulmen_attention_forward_call &);
int64_t attention_backward(const fulmen_attention_backward_call &);
int64_t states_forward(const fulmen_states_forward_call &);
int64_t states_backward(const fulmen_states_backward_call &);
int64_t step(const fulmen_step_call &);
int64_t attention_forward_workspace(const fulmen_attention_forward_call &);
int64_t attention_backward_workspace(const fulmen_attention_backward_call &);
int64_t states_forward_workspace(const fulmen_states_forward_call &);
int64_t states_backward_workspace(const fulmen_states_backward_call &);
int64_t fma_burst(int64_t rounds);
int64_t tpa_decode(const fulmen_tpa_decode_call &);
int64_t tpa_decode_workspace(const fulmen_tpa_decode_call &);
int64_t output_gate_forward(const fulmen_output_gate_forward_call &);
int64_t output_gate_backward(const fulmen_output_gate_backward_call &);
int64_t output_gate_forward_workspace(const fulmen_output_gate_forward_call &);
int64_t output_gate_backward_workspace(const fulmen_output_gate_backward_call &);
}  // namespace FULMEN_ISA
#endif

}  // namespace fulmen
