// Large results land in memory that was just allocated: with 4 KiB pages, faulting them in costs a fifth of a forward.
#pragma once

#include "fulmen.h"

namespace fulmen {

// Requests huge pages for [B, N, heads, channels] where that is worth a system call; a hint, never an error.
void prefer_huge_pages(const fulmen_tensor &x, int64_t batch, int64_t tokens, int64_t heads, int64_t size);

}  // namespace fulmen
