#include "delta_recurrence.h"
#include "kernels.h"

namespace fulmen {
namespace FULMEN_ISA {

int64_t delta_rule_step(const fulmen_delta_rule_step_call &call) {
    const fulmen_step_call &x = call.attention;
    return step_heads<DeltaTokenBuffer>(
        x, [&](DeltaTokenBuffer &buffer, const Head &head, Rows log_decay, int64_t batch, int64_t h) {
            buffer.load(head, rows_of(call.beta, batch, h), 0, x.decay_form, log_decay, call.normalize_qk != 0,
                        (float)x.scale);
        });
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
