// engram.hash: rows of the tables that a window of token ids addresses.
#pragma once

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::engram {

enum class IndexLayout { ltc, tlc };

// With h_1 = w_0*m_0 and h_k = h_(k-1) XOR (w_(k-1)*m_(k-1)) in wrapping 64-bit arithmetic, column
// c = (order-2)*Kh + head of layer l is
//   indices[l, t, c] = (h_order mod vocab_sizes[l, order-2, head]) + offsets[l, c],
// the remainder never negative. Masked tokens get -1 in all columns. Exact: the same values on
// every device. Strides of window and indices are free but for the last dimension; indices must be
// apart from the inputs. Bytes per token: 4*Nmax read, 4*L*C (or 8*L*C) written. Contract 1.5.
struct Hash {
  Tensor window{};            // I32[T, Nmax], compressed ids, slot 0 the current token
  Tensor multipliers{};       // I64[L, Nmax]
  Tensor vocab_sizes{};       // I32[L, Nmax-1, Kh], each > 0
  Tensor offsets{};           // I32 or I64[L, C], C = (Nmax-1)*Kh
  Tensor image_token_mask{};  // BOOL[T], optional
  Tensor indices{};           // out: I32 or I64, [L, T, C] or [T, L, C]
  IndexLayout layout = IndexLayout::ltc;
};

// Throws Error{contract} for a size that is not positive (CPU only: a device's sizes are not read)
// and for an offset table that I32 indices cannot hold.
EHC_API void hash(Context& context, const Hash& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const Hash& params);

}  // namespace ehc::engram
