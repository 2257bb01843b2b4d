// What one ISA build offers to the dispatcher.
#pragma once

#include "fulmen.h"

namespace fulmen {

#define FULMEN_POINTER(name) int64_t (*name)(const fulmen_##name##_call &);
struct Kernels {
    FULMEN_CALLS(FULMEN_POINTER)
    int64_t (*fma_burst)(int64_t rounds);
    bool multiplies_pairs, multiplies_tiles;  // kPairs and kTiles of simd.h
};
#undef FULMEN_POINTER

#ifdef FULMEN_ISA
namespace FULMEN_ISA {
#define FULMEN_KERNEL(name) int64_t name(const fulmen_##name##_call &);
FULMEN_CALLS(FULMEN_KERNEL)
#undef FULMEN_KERNEL
int64_t fma_burst(int64_t rounds);
int64_t attention_forward_workspace(const fulmen_attention_forward_call &);  // in bytes
// In builds that multiply in tiles, of problems that are: from the first token to the last, or reversed (Head).
int64_t attention_forward_in_tiles(const fulmen_attention_forward_call &, bool reversed);
}  // namespace FULMEN_ISA
#endif

}  // namespace fulmen
