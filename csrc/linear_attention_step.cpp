#include "kernels.h"
#include "recurrence.h"

namespace fulmen {
namespace FULMEN_ISA {

int64_t step(const fulmen_step_call &call) {
    return step_heads<TokenBuffer>(call, [&](TokenBuffer &buffer, const Head &head, Rows log_decay, int64_t, int64_t) {
        buffer.load(head, 0, call.decay_form, log_decay, call.decay_v_form, (float)call.scale);
    });
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
