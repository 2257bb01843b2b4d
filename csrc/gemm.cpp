#include "gemm.h"

namespace fulmen {
namespace FULMEN_ISA {

#define FULMEN_COMPILED_HERE(...) template struct Multiplication<__VA_ARGS__>;
FULMEN_ALL_PRODUCTS(FULMEN_COMPILED_HERE)

}  // namespace FULMEN_ISA
}  // namespace fulmen
