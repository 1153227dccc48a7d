// The types of kernel parameters. This header and params.cuh are plain C++, since csrc/library includes them too.
#pragma once

namespace mglu {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// Describes a matrix in global memory, from which TMA copies boxes. The driver encodes it (CUtensorMap).
struct alignas(64) TensorMap {
    u64 opaque[16];
};

}  // namespace mglu
