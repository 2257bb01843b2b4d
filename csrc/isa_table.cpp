// The table of one ISA build, under a name that the dispatcher knows.
#include "kernels.h"
#include "simd.h"

#define FULMEN_JOIN(a, b) a##b
#define FULMEN_TABLE(isa) FULMEN_JOIN(kernels_, isa)
#define FULMEN_ENTRY(name) FULMEN_ISA::name,

namespace fulmen {

extern const Kernels FULMEN_TABLE(FULMEN_ISA);
const Kernels FULMEN_TABLE(FULMEN_ISA) = {FULMEN_CALLS(FULMEN_ENTRY) FULMEN_ISA::fma_burst, FULMEN_ISA::kPairs,
                                          FULMEN_ISA::kTiles};

}  // namespace fulmen
