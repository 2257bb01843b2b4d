// Small calls against the plain formulas, to refuse a build that computes wrongly.
#pragma once

#include "kernels.h"

namespace fulmen {

bool self_check(const Kernels &kernels);

}  // namespace fulmen
