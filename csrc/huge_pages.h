// Large results land in memory that was just allocated: with 4 KiB pages, faulting them in costs a fifth of a forward.
#pragma once

#include "fulmen.h"

namespace fulmen {

// Asks for huge pages behind [B, N, heads, features] where that is worth a system call; a hint, never an error.
void prefer_huge_pages(const fulmen_tensor &x, int64_t batch, int64_t tokens, int64_t heads, int64_t features);

}  // namespace fulmen
