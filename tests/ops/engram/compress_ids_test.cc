#include "ehc/engram/compress_ids.h"

#include "tests/ops/engram/support.h"

namespace ehc::engram {
namespace {

using test::error_of;

template <class Id>
std::vector<int32_t> compress(const std::vector<Id>& ids, const std::vector<int32_t>& table,
                              bool checked) {
  std::vector<int32_t> out(ids.size(), 77);
  Context context = Context::cpu(2);
  const auto count = static_cast<int64_t>(ids.size());
  compress_ids(context, {.ids = {ids.data(), sizeof(Id) == 8 ? DType::i64 : DType::i32, {count}},
                         .table = {table.data(), DType::i32, {static_cast<int64_t>(table.size())}},
                         .compressed_ids = {out.data(), DType::i32, {count}},
                         .checked = checked});
  return out;
}

TEST(CompressIds, EveryIdHasAnAnswer) {
  const std::vector<int32_t> table = {4, 3, 9};
  EXPECT_EQ(compress<int32_t>({2, 0, -1, INT32_MIN, 1}, table, true),
            (std::vector<int32_t>{9, 4, -1, INT32_MIN, 3}));
  EXPECT_EQ(compress<int32_t>({3, INT32_MAX, 2}, table, false), (std::vector<int32_t>{-1, -1, 9}));
  EXPECT_EQ(compress<int64_t>({int64_t{1} << 32, INT64_MAX, INT64_MIN, -5, 0}, table, false),
            (std::vector<int32_t>{-1, -1, -1, -5, 4}));
  EXPECT_EQ(compress<int32_t>({-3, 0}, {}, false), (std::vector<int32_t>{-3, -1}));
  EXPECT_TRUE(compress<int64_t>({}, table, true).empty());

  std::vector<int32_t> many(70000);
  std::vector<int32_t> expected(many.size());
  for (size_t i = 0; i < many.size(); ++i) {
    many[i] = static_cast<int32_t>(i * 7 % 4) - 1;
    expected[i] = many[i] < 0 ? -1 : table[static_cast<size_t>(many[i])];
  }
  EXPECT_EQ(compress(many, table, true), expected);
}

TEST(CompressIds, CheckedIdsAreRefusedByPosition) {
  EXPECT_EQ(error_of([] {
              compress<int32_t>({0, 3}, {4, 3, 9}, true);
            }),
            "engram.compress_ids: tensor 'ids': expected ids < V = 3, got 3 at position 1");
  EXPECT_EQ(error_of([] {
              compress<int64_t>({0, int64_t{1} << 40}, {4}, true);
            }),
            "engram.compress_ids: tensor 'ids': expected ids < V = 1, got 1099511627776 at "
            "position 1");
  EXPECT_EQ(error_of([] { compress<int64_t>({INT64_MIN}, {4}, true); }),
            "engram.compress_ids: tensor 'ids': expected negative ids that fit I32, got "
            "-9223372036854775808 at position 0");
  EXPECT_EQ(error_of([] { compress<int32_t>({0}, {}, true); }),
            "engram.compress_ids: tensor 'ids': expected ids < V = 0, got 0 at position 0");
}

}  // namespace
}  // namespace ehc::engram
