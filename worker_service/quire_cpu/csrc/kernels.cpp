// The kernels of one instruction set. This file is compiled once per set, with QUIRE_ISA defined as the set's name.
#include "kernels.h"

#include "attention.h"
#include "draw.h"
#include "linear.h"
#include "recurrent.h"
#include "rows.h"

namespace QUIRE_ISA {

template <class A, void (*IN_FLOAT32)(const A&), void (*IN_BFLOAT16)(const A&)>
void by_dtype(const A* arguments) {
    if (arguments->dtype == QUIRE_BFLOAT16) {
        IN_BFLOAT16(*arguments);
    } else {
        IN_FLOAT32(*arguments);
    }
}

}  // namespace QUIRE_ISA

#define QUIRE_JOIN(a, b) a##b
#define QUIRE_NAME(a, b) QUIRE_JOIN(a, b)
#define QUIRE_TEXT(a) #a
#define QUIRE_STRING(a) QUIRE_TEXT(a)

namespace isa = QUIRE_ISA;

extern const Kernels QUIRE_NAME(kernels_, QUIRE_ISA);
const Kernels QUIRE_NAME(kernels_, QUIRE_ISA) = {
    QUIRE_STRING(QUIRE_ISA),
    isa::by_dtype<QuireAttend, isa::attend_of<float>, isa::attend_of<isa::Bfloat16>>,
    isa::by_dtype<QuireAppend, isa::append_of<float>, isa::append_of<isa::Bfloat16>>,
    isa::by_dtype<QuireRotate, isa::rotate_of<float>, isa::rotate_of<isa::Bfloat16>>,
    isa::by_dtype<QuireNorm, isa::norm_of<float>, isa::norm_of<isa::Bfloat16>>,
    isa::by_dtype<QuireLinear, isa::linear_of<float>, isa::linear_of<isa::Bfloat16>>,
    isa::by_dtype<QuirePack, isa::pack_of<float>, isa::pack_of<isa::Bfloat16>>,
    isa::by_dtype<QuireConvolve, isa::convolve_of<float>, isa::convolve_of<isa::Bfloat16>>,
    isa::by_dtype<QuireScan, isa::scan_of<float>, isa::scan_of<isa::Bfloat16>>,
    isa::draw,
    isa::greedy,
};
