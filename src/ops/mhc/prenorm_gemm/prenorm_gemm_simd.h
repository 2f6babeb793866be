// What the kernels of the projection share: chunk after chunk, the tree of their sums, the outputs.
#pragma once

#include <cstring>

#include "core/float_formats.h"
#include "ops/mhc/prenorm_gemm/prenorm_gemm_args.h"
#include "ops/mhc/shared/stream_rows_simd.h"

namespace ehc::mhc::EHC_ISA {
namespace {

using simd::kPair;

// sums += more
EHC_SIMD void add_to(float* sums, const float* more, int64_t count) {
  int64_t i = 0;
  for (; i + kPair <= count; i += kPair) {
    simd::store(sums + i, add(simd::load(more + i), simd::load(sums + i)));
  }
  if (i < count) {
    simd::store_some(
        sums + i, add(simd::load_some(more + i, count - i), simd::load_some(sums + i, count - i)),
        count - i, false);
  }
}

// Sums of chunks in the order of pairwise_sum, each `count` floats. Chunks that are left out count
// as zeros.
class SumTree {
 public:
  SumTree() = default;
  // For `levels` levels; `room` is for one set of sums more.
  SumTree(float* room, int64_t count, int64_t levels) : fresh_(room), count_(count) {
    for (int64_t i = 0; i < levels; ++i) levels_[i] = room + (i + 1) * count;
  }

  // Where the sums of the next chunk go.
  [[nodiscard]] float* fresh() const { return fresh_; }
  // They are those of chunk `index`, which ascends.
  void push(int64_t index) {
    int level = 0;
    for (; (index >> level & 1) != 0; ++level) {
      if ((filled_ >> level & 1) != 0) add_to(fresh_, levels_[level], count_);
      filled_ &= ~(uint64_t{1} << level);
    }
    float* free = levels_[level];
    levels_[level] = fresh_;
    fresh_ = free;
    filled_ |= uint64_t{1} << level;
  }
  // The sum of all; null when there was none.
  [[nodiscard]] const float* finish() const {
    float* sum = nullptr;
    for (int level = 0; filled_ >> level != 0; ++level) {
      if ((filled_ >> level & 1) == 0) continue;
      if (sum) add_to(levels_[level], sum, count_);
      sum = levels_[level];
    }
    return sum;
  }

 private:
  float* levels_[kPrenormLevels] = {};
  float* fresh_ = nullptr;
  int64_t count_ = 0;
  uint64_t filled_ = 0;
};

// The outputs of tokens [begin, end). The sums of the i-th of them begin at sums[product.place(i)];
// `sums` null: zeros.
template <class Product>
inline void write_sums(const PrenormGemmArgs& a, int64_t split, int64_t group, int64_t begin,
                       int64_t end, const Product& product, const float* sums) {
  for (int64_t t = begin; t < end; ++t) {
    float* mul = a.mul_partial.data + split * a.mul_partial.split_stride +
                 t * a.mul_partial.token_stride + group * a.mul_partial.group_stride;
    float* sqr = a.sqr_partial.data + split * a.sqr_partial.split_stride +
                 t * a.sqr_partial.token_stride + group * a.sqr_partial.group_stride;
    const float* row = sums ? sums + product.place(t - begin) : nullptr;
    for (int64_t j = 0; j < a.mixes; ++j) mul[j] = row ? row[j * Product::kStep] : 0.0f;
    *sqr = row ? row[a.mixes * Product::kStep] : 0.0f;
  }
}

// The arrays of a kernel call.
struct Scratch {
  PrenormScratch layout;
  float *fn, *rows, *widened, *trees;

  Scratch(const PrenormGemmArgs& a, int64_t tokens, float* at)
      : layout(prenorm_scratch(a, tokens)),
        fn(at),
        rows(fn + layout.fn),
        widened(rows + layout.rows),
        trees(widened + layout.widened) {}
};

// Columns of fn that are fetched while others are multiplied, a share for every token of every
// chunk: fetched at once they would wait for each other.
class FnAhead {
 public:
  FnAhead(const PrenormGemmArgs& a, const Columns& columns, int64_t tokens, int64_t chunks)
      : row_(a.fn.data + columns.begin), stride_(a.fn.stride) {
    lines_of_row_ = (columns.end - columns.begin + kLine - 1) / kLine;
    left_ = lines_of_row_ * a.mixes;
    share_ = (left_ + tokens * chunks - 1) / (tokens * chunks);
  }
  EHC_SIMD void fetch(int64_t tokens) {
    int64_t count = tokens * share_ < left_ ? tokens * share_ : left_;
    left_ -= count;
    for (; count > 0; --count) {
      simd::prefetch(row_ + line_ * kLine);
      if (++line_ == lines_of_row_) line_ = 0, row_ += stride_;
    }
  }

 private:
  static constexpr int64_t kLine = 64 / sizeof(float);
  const float* row_;
  int64_t stride_, lines_of_row_ = 0, left_ = 0, share_ = 0, line_ = 0;
};

// A chunk of columns.
struct Chunk {
  Columns columns;
  int64_t index;  // in the split
  int place;      // among those that go together
};

// What is wanted after a group of tokens of a chunk.
struct Ahead {
  int64_t elements;  // from its elements to others, where streams lie side by side
  FnAhead* fn;
};

// The columns of one RMS group that a split has, chunk by chunk; chunks count from the start of the
// split. Several go together, so that rows are read a page at a time. A Product prepares a chunk
// and multiplies a group of tokens with it, which sets `sums`; there mix j of token i is at
// place(i) + j * kStep, the squares are at j = M, and all that `count` tokens have lies within the
// first floats(count).
template <class Product>
inline void project_columns(const PrenormGemmArgs& a, Product& product, const Scratch& scratch,
                            int64_t split, int64_t rms_group, int64_t begin, int64_t end) {
  const int64_t tokens = end - begin, levels = scratch.layout.levels;
  SumTree trees[kPrenormTokens / kPrenormGroup];
  for (int64_t t = 0; t < tokens; t += kPrenormGroup) {
    const int64_t count = tokens - t < kPrenormGroup ? tokens - t : kPrenormGroup;
    trees[t / kPrenormGroup] = {
        scratch.trees + t / kPrenormGroup * (levels + 1) * scratch.layout.sums,
        product.floats(count), levels};
  }
  const Columns of_split = columns_of_split(a, split);
  const int64_t width = a.sizes.streams * a.sizes.hidden / a.groups;
  const int64_t first = rms_group * width, last = first + width;
  const int64_t start = of_split.begin > first ? of_split.begin : first;
  const int64_t stop = of_split.end < last ? of_split.end : last;
  const int together = chunks_together(a.mixes);
  for (int64_t k = start; k < stop;) {
    Chunk chunks[kChunksTogether];
    int count = 0;
    for (; count < together && k < stop; ++count) {
      const int64_t index = (k - of_split.begin) / kChunkColumns;
      const int64_t border = of_split.begin + (index + 1) * kChunkColumns;
      chunks[count] = {{k, border < stop ? border : stop}, index, count};
      k = chunks[count].columns.end;
      product.prepare(chunks[count]);
    }
    const int64_t next = k < stop ? k : start, after = next + together * kChunkColumns;
    FnAhead fn(a, {next, after < stop ? after : stop}, tokens, count);
    for (int64_t t = 0; t < tokens; t += kPrenormGroup) {
      const bool more = t + kPrenormGroup < tokens;
      SumTree& tree = trees[t / kPrenormGroup];
      for (int c = 0; c < count; ++c) {
        const bool stays = c + 1 < count;
        const int64_t row = stays ? 0 : more ? kPrenormGroup : -t;
        const int64_t column = stays  ? chunks[c + 1].columns.begin
                               : more ? chunks[0].columns.begin
                                      : next;
        product.multiply(t, chunks[c],
                         {row * a.residual.token_stride + column - chunks[c].columns.begin, &fn},
                         tree.fresh());
        tree.push(chunks[c].index);
      }
    }
  }
  for (int64_t t = 0; t < tokens; t += kPrenormGroup) {
    const int64_t group_end = t + kPrenormGroup < tokens ? t + kPrenormGroup : tokens;
    write_sums(a, split, rms_group, begin + t, begin + group_end, product,
               trees[t / kPrenormGroup].finish());
  }
}

// The streams of tokens as rows of K columns.
template <class A>
class StreamColumns {
 public:
  StreamColumns(const PrenormGemmArgs& a, int64_t first_token)
      : rows_(a.residual), hidden_(a.sizes.hidden), first_(first_token) {
    side_by_side_ = rows_.stream_stride == hidden_ || a.sizes.streams == 1;
  }

  // Do a token's streams lie side by side?
  [[nodiscard]] bool side_by_side() const { return side_by_side_; }
  [[nodiscard]] int64_t token_stride() const { return rows_.token_stride; }
  // A token's columns from `column` on, where its streams lie side by side.
  [[nodiscard]] const A* at(int64_t token, int64_t column) const {
    return static_cast<const A*>(rows_.data) + (first_ + token) * rows_.token_stride + column;
  }
  // A token's columns in one row, anyhow.
  void copy(int64_t token, const Columns& columns, A* to) const {
    for (int64_t k = columns.begin; k < columns.end;) {
      const int64_t stream = k / hidden_, border = (stream + 1) * hidden_;
      const int64_t end = border < columns.end ? border : columns.end;
      std::memcpy(to + k - columns.begin,
                  at(token, stream * rows_.stream_stride + k - stream * hidden_),
                  static_cast<size_t>(end - k) * sizeof(A));
      k = end;
    }
  }

 private:
  StreamRows rows_;
  int64_t hidden_, first_;
  bool side_by_side_;
};

// fn[j] from `begin` on; `room` is for one that is rounded.
EHC_SIMD const float* fn_row(const PrenormGemmArgs& a, int64_t j, int64_t begin, int64_t width,
                             float* room) {
  const float* row = a.fn.data + j * a.fn.stride + begin;
  if (!a.tf32) return row;
  for (int64_t k = 0; k < width; ++k) room[k] = round_to_tf32(row[k]);
  return room;
}

}  // namespace
}  // namespace ehc::mhc::EHC_ISA
