// How the convolution's backward pass walks over the tokens of a chunk.
#pragma once

#include "ops/engram/conv/conv_simd.h"

namespace ehc::engram::EHC_ISA {
namespace {

// A run, and the tokens [final_begin, final_end) that it finishes.
struct GradRun {
  ConvRun run;
  int64_t stop;  // of the sequence
  int64_t final_begin, final_end;
  bool fresh;  // nothing is carried over from a run before
  bool own;    // its tokens belong to the chunk; else they only follow it
};

// The runs of a chunk [begin, end), and behind it those tokens that its last ones depend on.
class GradCursor {
 public:
  GradCursor(const ShortConv& conv, int64_t tokens, int64_t begin, int64_t end, int64_t limit)
      : conv_(conv),
        runs_(conv, begin, end),
        tokens_(tokens),
        begin_(begin),
        end_(end),
        limit_(limit),
        history_(conv_history(conv.taps, conv.dilation)) {}

  // Without tokens at the end.
  GradRun next() {
    GradRun r{};
    if (behind_) {
      r.run = {end_, min(stop_, end_ + history_), last_.sequence, last_.start};
      behind_ = false;
    } else {
      r.own = true;
      r.run = runs_.next(limit_);
      stop_ = conv_.cu_seqlens && r.run.begin < r.run.end ? conv_.cu_seqlens[r.run.sequence + 1]
                                                          : tokens_;
      last_ = r.run;
      behind_ = r.run.begin < r.run.end && r.run.end == end_ && end_ < stop_ && history_ > 0;
    }
    const int64_t first = r.run.start > begin_ ? r.run.start : begin_;
    r.stop = stop_;
    r.fresh = r.run.begin <= first;
    r.final_begin = r.run.begin - history_ > first ? r.run.begin - history_ : first;
    const bool complete = !r.own || r.run.end == stop_;
    r.final_end = complete ? min(r.run.end, end_) : r.run.end - history_;
    if (r.final_end < r.final_begin) r.final_end = r.final_begin;
    return r;
  }

 private:
  static int64_t min(int64_t x, int64_t y) { return x < y ? x : y; }

  const ShortConv& conv_;
  RunCursor runs_;
  int64_t tokens_, begin_, end_, limit_, history_;
  ConvRun last_{};
  int64_t stop_ = 0;
  bool behind_ = false;
};

// The tokens of a chunk one by one, where no tile holds them.
class TokenCursor {
 public:
  TokenCursor(const ShortConv& conv, int64_t tokens, int64_t begin, int64_t end)
      : conv_(conv), tokens_(tokens), runs_(conv, begin, end) {}

  GradRun next() {
    const ConvRun run = runs_.next(1);
    const int64_t stop = conv_.cu_seqlens ? conv_.cu_seqlens[run.sequence + 1] : tokens_;
    return {run, stop, run.begin, run.end, true, true};
  }

 private:
  const ShortConv& conv_;
  int64_t tokens_;
  RunCursor runs_;
};

}  // namespace
}  // namespace ehc::engram::EHC_ISA
