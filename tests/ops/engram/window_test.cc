#include "ehc/engram/window.h"

#include "tests/ops/engram/support.h"

namespace ehc::engram {
namespace {

using test::context_for;
using test::error_of;
using test::implementations;

// One batch and how to look at it.
struct Batch {
  std::vector<int32_t> ids;
  std::vector<uint8_t> mask;
  std::vector<int32_t> borders;  // empty: one sequence
  std::vector<int32_t> history;  // empty: none
  int64_t max_ngram = 3;
  int64_t reset_id = -1;
  Blocking blocking = Blocking::slot;

  [[nodiscard]] int64_t sequences() const {
    return borders.empty() ? 1 : static_cast<int64_t>(borders.size()) - 1;
  }
  [[nodiscard]] Window params() const {
    const auto tokens = static_cast<int64_t>(ids.size());
    Window p = {.ids = {ids.data(), DType::i32, {tokens}},
                .max_ngram = max_ngram,
                .pad_id = 2,
                .reset_id = reset_id,
                .blocking = blocking};
    if (!mask.empty()) p.image_token_mask = {mask.data(), DType::boolean, {tokens}};
    if (!borders.empty()) p.cu_seqlens = {borders.data(), DType::i32, {sequences() + 1}};
    if (!history.empty()) p.history = {history.data(), DType::i32, {sequences(), max_ngram - 1}};
    return p;
  }
  // Rows one after the other; written with `padding` elements between them.
  std::vector<int32_t> run(const std::string& implementation, int threads = 1,
                           int64_t padding = 0) const {
    const auto tokens = static_cast<int64_t>(ids.size());
    const int64_t stride = max_ngram + padding;
    std::vector<int32_t> out(static_cast<size_t>(tokens * stride), -9);
    Window p = params();
    p.window = {out.data(), DType::i32, {tokens, stride}};
    p.window.shape[1] = max_ngram;
    Context context = context_for(implementation, threads);
    window(context, p);
    std::vector<int32_t> rows;
    for (int64_t i = 0; i < tokens * stride; ++i) {
      if (i % stride < max_ngram) {
        rows.push_back(out[static_cast<size_t>(i)]);
      } else {
        EXPECT_EQ(out[static_cast<size_t>(i)], -9) << "written between rows";
      }
    }
    return rows;
  }
};

// Ids from a small range, so that reset ids and negative ones are frequent.
Batch random_batch(std::mt19937& generator, int64_t tokens) {
  const auto below = [&](uint32_t n) { return static_cast<int32_t>(generator() % n); };
  Batch batch;
  batch.max_ngram = 2 + below(7);
  batch.reset_id = below(2) == 0 ? -1 : 5;
  batch.blocking = below(2) == 0 ? Blocking::slot : Blocking::farther;
  for (int64_t t = 0; t < tokens; ++t) {
    batch.ids.push_back(below(12) - 1);
    batch.mask.push_back(below(6) == 0 ? 1 : 0);
  }
  if (below(3) == 0) batch.mask.clear();
  return batch;
}

TEST(Window, CpuEqualsReferenceForAnyThreads) {
  std::mt19937 generator(1);
  for (const int64_t tokens : {0, 1, 2, 31, 33, 20000}) {
    for (int round = 0; round < 4; ++round) {
      Batch batch = random_batch(generator, tokens);
      if (round > 0) {  // borders anywhere, some sequences empty
        batch.borders = {0, 0};
        while (batch.borders.back() < tokens) {
          const auto step = static_cast<int32_t>(generator() % 6);
          batch.borders.push_back(
              std::min(batch.borders.back() + step * step, static_cast<int32_t>(tokens)));
        }
        batch.borders.push_back(static_cast<int32_t>(tokens));
      }
      if (round > 1) {
        for (int64_t i = 0; i < batch.sequences() * (batch.max_ngram - 1); ++i) {
          batch.history.push_back(static_cast<int32_t>(generator() % 9) - 1);
        }
      }
      const std::vector<int32_t> expected = batch.run("reference");
      EXPECT_EQ(batch.run("cpu", 1), expected);
      EXPECT_EQ(batch.run("cpu", 3, 2), expected);
    }
  }
}

TEST(Window, PiecesWithHistoryGiveOnePass) {
  std::mt19937 generator(2);
  for (int round = 0; round < 60; ++round) {
    const Batch whole = random_batch(generator, 1 + generator() % 40);
    const std::vector<int32_t> expected = whole.run("reference");
    for (const std::string& impl : implementations("engram.window")) {
      std::vector<int32_t> rows;
      for (size_t begin = 0; begin < whole.ids.size();) {
        const size_t step = round % 2 == 0 ? 1 : 1 + generator() % 5;
        const size_t end = std::min(whole.ids.size(), begin + step);
        Batch piece = whole;
        piece.ids.assign(whole.ids.begin() + begin, whole.ids.begin() + end);
        if (!whole.mask.empty()) {
          piece.mask.assign(whole.mask.begin() + begin, whole.mask.begin() + end);
        }
        for (int64_t k = whole.max_ngram - 1; k >= 1; --k) {
          const int64_t at = static_cast<int64_t>(begin) - k;
          const bool none = at < 0 || (!whole.mask.empty() && whole.mask[at] != 0);
          piece.history.push_back(none ? -1 : whole.ids[at]);
        }
        const std::vector<int32_t> part = piece.run(impl);
        rows.insert(rows.end(), part.begin(), part.end());
        begin = end;
      }
      EXPECT_EQ(rows, expected) << impl;
    }
  }
}

TEST(Window, ResetShowsItselfAndNothingBefore) {
  Batch batch;
  batch.ids = {7, 5, 8, 5, 9};
  batch.max_ngram = 4;
  batch.reset_id = 5;
  EXPECT_EQ(batch.run("cpu"), (std::vector<int32_t>{7, 2, 2, 2,  //
                                                    5, 7, 2, 2,  //
                                                    8, 5, 2, 2,  //
                                                    5, 8, 5, 2,  //
                                                    9, 5, 2, 2}));
}

TEST(Window, ImagesBlockASlotOrEverythingFarther) {
  Batch batch;
  batch.ids = {7, 8, 9};
  batch.mask = {0, 1, 0};
  EXPECT_EQ(batch.run("cpu"), (std::vector<int32_t>{7, 2, 2, 2, 7, 2, 9, 2, 7}));
  batch.blocking = Blocking::farther;
  EXPECT_EQ(batch.run("cpu"), (std::vector<int32_t>{7, 2, 2, 2, 2, 2, 9, 2, 2}));
}

TEST(Window, RefusesBadBordersAndAttributes) {
  Batch batch;
  batch.ids = {1, 2, 3};
  const auto refusal = [&](std::vector<int32_t> borders) {
    batch.borders = std::move(borders);
    return error_of([&] { batch.run("cpu"); });
  };
  const std::string name = "engram.window: tensor 'cu_seqlens': expected ";
  EXPECT_EQ(refusal({1, 3}), name + "a first element 0, got 1 at position 0");
  EXPECT_EQ(refusal({0, 2, 1, 3}), name + "elements that do not decrease, got 1 at position 2");
  EXPECT_EQ(refusal({0, 2}), name + "a last element T = 3, got 2 at position 1");
  EXPECT_EQ(refusal({0, 4}), name + "a last element T = 3, got 4 at position 1");
  batch.borders.clear();
  batch.history = {1, 2, 3, 4};
  batch.max_ngram = 5;
  batch.history.resize(4);
  EXPECT_EQ(error_of([&] { batch.run("cpu"); }), "none");
  Window p = batch.params();
  p.max_ngram = 9;
  Context context = Context::cpu(1);
  EXPECT_EQ(error_of([&] { window(context, p); }),
            "engram.window: attribute 'max_ngram': expected in [2,8], got 9");
  p = batch.params();
  p.blocking.reset();
  EXPECT_EQ(error_of([&] { window(context, p); }),
            "engram.window: attribute 'blocking': expected a value, got none");
  p = batch.params();
  p.pad_id = int64_t{1} << 31;
  EXPECT_EQ(error_of([&] { window(context, p); }),
            "engram.window: attribute 'pad_id': expected in [0,2147483647], got 2147483648");
}

}  // namespace
}  // namespace ehc::engram
