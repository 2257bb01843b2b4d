// A small forward and backward of each operator against its definition, to refuse a build that computes wrongly.
#pragma once

#include "kernels.h"

namespace fulmen {

bool self_check(const Kernels &kernels);

}  // namespace fulmen
