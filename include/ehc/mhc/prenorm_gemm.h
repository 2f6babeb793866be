// mhc.prenorm_gemm: all streams of a token projected to its mixes, before their norm.
#pragma once

#include <cstdint>

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::mhc {

// fp32: nothing is rounded, the error is that of an fp32 sum.
// tf32: fn is rounded to TF32, to nearest even; nothing else is.
enum class Precision { fp32, tf32 };

// With x[t,k] the K = n*d flattened streams of a token:
//   mul_partial[s,t,g,j] = sum of x[t,k] * fn[j,k] over the columns k in split s and group g
//   sqr_partial[s,t,g]   = sum of x[t,k]^2 over the same
// Groups are G = `groups` equal parts of the K columns; with one group the outputs have no axis G.
//
// splits = 0: S = prenorm_splits(T, K). Columns are cut into chunks that K alone decides, each
// summed in one order, and split s is a node of the pairwise tree over the chunks: adding the
// splits by that tree, as reduce_partials_fwd does, gives the same bits for any T (class B).
// splits = S > 0: blocks of 64 columns, the first (blocks mod S) splits take one more; class R.
// A split without columns writes zeros.
//
// On the CPU "cpu.amx" multiplies on tiles, where the processor and the system have them and A is
// BF16; T does not matter, so class B holds. fn below 2^-118 loses bits there, subnormals are zero.
// On CUDA products are those of tensor cores, of bf16 parts that hold fp32; below 2^-118 bits are
// lost.
//
// A is BF16, F16 or F32. Strides are free but for the last dimension. Aliasing: none. Per
// implementation the same bits for any threads, strides, alignment. Bytes: T*K elements of A,
// 4*M*K, 4*S*T*G*(M+1). Contract 2.3.
struct PrenormGemm {
  Tensor residual{};     // A[T, n, d]
  Tensor fn{};           // F32[M, n*d], M is 1..80; with the norm weight merged into it
  Tensor mul_partial{};  // out: F32[S, T, M] or F32[S, T, G, M]
  Tensor sqr_partial{};  // out: F32[S, T] or F32[S, T, G]
  int64_t splits = 0;    // 0..1024
  int64_t groups = 1;    // divides n*d
  Precision precision = Precision::fp32;
};

// Throws Error{contract} for arguments that break the above. Needs workspace.
EHC_API void prenorm_gemm(Context& context, const PrenormGemm& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const PrenormGemm& params);

// S of splits = 0: a power of two.
EHC_API int64_t prenorm_splits(int64_t tokens, int64_t columns);

}  // namespace ehc::mhc
