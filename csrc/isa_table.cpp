// The table of one ISA build, under a name that the dispatcher knows.
#include "kernels.h"

#define FULMEN_JOIN(a, b) a##b
#define FULMEN_TABLE(isa) FULMEN_JOIN(kernels_, isa)

namespace fulmen {

extern const Kernels FULMEN_TABLE(FULMEN_ISA);
const Kernels FULMEN_TABLE(FULMEN_ISA) = {FULMEN_ISA::attention_forward,
                                          FULMEN_ISA::attention_backward,
                                          FULMEN_ISA::states_forward,
                                          FULMEN_ISA::states_backward,
                                          FULMEN_ISA::step,
                                          FULMEN_ISA::attention_forward_workspace,
                                          FULMEN_ISA::attention_backward_workspace,
                                          FULMEN_ISA::states_forward_workspace,
                                          FULMEN_ISA::states_backward_workspace,
                                          FULMEN_ISA::fma_burst,
                                          FULMEN_ISA::tpa_decode,
                                          FULMEN_ISA::tpa_decode_workspace,
                                          FULMEN_ISA::output_gate_forward,
                                          FULMEN_ISA::output_gate_backward,
                                          FULMEN_ISA::output_gate_forward_workspace,
                                          FULMEN_ISA::output_gate_backward_workspace};

}  // namespace fulmen
