// engram.fused_weight on CUDA (sm_80+): wf[h,i] = wh[h,i] * we[h,i] in fp32. Class E: one product,
// exact for bf16. Weights W[n,d], wf F32[n,d]. Bytes: n*d*(the two weights' elements + 4). A thread
// per eight columns of a stream.
#include "ops/engram/fused_weight/fused_weight_args.h"
#include "ops/engram/shared/table_rows.cuh"

namespace ehc::engram {

namespace {

template <bool kVector, class Hidden, class Embed>
__global__ void fused_weight_kernel(const __grid_constant__ FusedWeightArgs a,
                                    int64_t column_blocks) {
  const RowPlace at(column_blocks, kEight, 1);
  const int64_t count = a.hidden - at.column;
  if (count <= 0 || at.row >= a.streams) return;
  EightOf<Hidden> hidden;
  EightOf<Embed> embed;
  hidden.template load<kVector>(static_cast<const Hidden*>(a.hidden_weight) +
                                    at.row * a.hidden_weight_stream_stride + at.column,
                                count);
  embed.template load<kVector>(
      static_cast<const Embed*>(a.embed_weight) + at.row * a.embed_weight_stream_stride + at.column,
      count);
  EightOf<float>::of([&](int k) {
    return hidden[k] * embed[k];
  }).template store<kVector>(a.fused + at.row * a.fused_stream_stride + at.column, count);
}

}  // namespace

void fused_weight_cuda(const FusedWeightArgs& a, int device, void* stream) {
  const bool vector =
      a.hidden % kEight == 0 &&
      are_aligned(a.hidden_weight, a.hidden_weight_stream_stride, size_of(a.hidden_type)) &&
      are_aligned(a.embed_weight, a.embed_weight_stream_stride, size_of(a.embed_type)) &&
      are_aligned(a.fused, a.fused_stream_stride, sizeof(float));
  with_weight(a.hidden_type, [&](auto hidden) {
    with_weight(a.embed_type, [&](auto embed) {
      with_flag(vector, [&](auto is_vector) {
        launch_rows("engram.fused_weight", device, stream, cut_rows(a.streams, a.hidden, kEight, 1),
                    &fused_weight_kernel<is_vector(), decltype(hidden), decltype(embed)>, a);
      });
    });
  });
}

}  // namespace ehc::engram
