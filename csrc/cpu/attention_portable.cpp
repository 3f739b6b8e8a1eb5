// The attention kernel for what the compiler targets by itself.
#include "attention_includes.h"

namespace eagle2::portable {
#define EAGLE2_VECTOR_BYTES 16
#include "attention_kernel.h"
}  // namespace eagle2::portable
