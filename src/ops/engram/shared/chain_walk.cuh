// The order in which a run of tokens goes through the short convolution on CUDA: along chains of
// tokens `dilation` apart, each after the tokens before the run that its first ones see.
#pragma once

#include "ops/engram/layer/layer_args.h"
#include "ops/engram/shared/conv_rows.cuh"
#include "ops/engram/shared/gate_rows.cuh"

namespace ehc::engram {

// What is known of a token of a chain.
struct ChainToken {
  int64_t token;
  bool writes;  // it is of the run, not of the history before it
  bool starts;  // nothing of its sequence was before it in this chain
  bool image;
  bool last;
};

// The tokens of a run: those `dilation` apart after their history, then those beside them.
class ChainWalk {
 public:
  __device__ ChainWalk(const LayerForwardArgs& a, int64_t begin, int64_t end)
      : a_(a),
        begin_(begin),
        end_(end),
        dilation_(a.conv.dilation),
        residues_(min(a.conv.dilation, end - begin)),
        cursor_(a.conv, a.gate.tokens, begin) {
    start();
  }
  [[nodiscard]] __device__ bool ended() const { return residue_ == residues_; }
  __device__ ChainToken next() {
    const SequenceAt& sequence = cursor_.of(max(token_, begin_ + residue_));
    ChainToken now{token_, token_ >= begin_, is_first_ || token_ - dilation_ < sequence.begin,
                   image_, false};
    token_ += dilation_;
    is_first_ = false;
    if (token_ >= end_) {
      ++residue_;
      now.last = ended();
      if (now.last) return now;
      cursor_ = SequenceCursor(a_.conv, a_.gate.tokens, begin_);
      start();
    }
    image_ = is_image(a_.gate.image_token_mask, token_);
    return now;
  }

 private:
  __device__ void start() {
    const int64_t first = begin_ + residue_;
    const int64_t before = (first - cursor_.of(first).begin) / dilation_;
    token_ = first - min(before, int64_t{kChainTaps - 1}) * dilation_;
    is_first_ = true;
    image_ = is_image(a_.gate.image_token_mask, token_);
  }

  const LayerForwardArgs& a_;
  int64_t begin_, end_, dilation_, residues_;
  int64_t residue_ = 0;
  int64_t token_ = 0;
  bool is_first_ = true;
  bool image_ = false;  // of token_, asked for a step ahead
  SequenceCursor cursor_;
};

// How many tokens a run's walk has; by a whole warp.
__device__ inline int64_t chain_tokens(const LayerForwardArgs& a, int64_t begin, int64_t end) {
  const int64_t dilation = a.conv.dilation;
  int64_t count = 0;
  for (int64_t first = begin + threadIdx.x % cuda::kWarp; first < min(end, begin + dilation);
       first += cuda::kWarp) {
    SequenceCursor cursor(a.conv, a.gate.tokens, first);
    const int64_t before = (first - cursor.of(first).begin) / dilation;
    count += min(before, int64_t{kChainTaps - 1}) + (end - 1 - first) / dilation + 1;
  }
  for (int distance = cuda::kWarp / 2; distance > 0; distance /= 2) {
    count += __shfl_xor_sync(cuda::kAllLanes, count, distance);
  }
  return count;
}

}  // namespace ehc::engram
