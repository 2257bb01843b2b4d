// Small calls of each operator against its definition, to refuse a build that computes wrongly.
#pragma once

#include "kernels.h"

namespace fulmen {

bool self_check(const Kernels &kernels);

// Its part for linear attention and the delta rule, with inputs of a dtype.
bool recurrences_are_right(const Kernels &kernels, int64_t dtype);

}  // namespace fulmen
