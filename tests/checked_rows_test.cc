// What a run reports about its comparisons with the reference.
#include "cli/checked_rows.h"

#include <gtest/gtest.h>

#include "cli/commands.h"

namespace ehc::cli {
namespace {

TEST(CheckedRows, KeepTheWorstOfAnOutput) {
  CheckedRows rows;
  rows.add("op", "out", 3,
           {.equal = true, .max_error = 0.5, .max_ulp = 1, .calc_diff = 0.25, .note = {}});
  rows.add("op", "other", 1, {.equal = true, .note = {}});
  rows.add("op", "out", 4,
           {.equal = true, .max_error = 0.125, .max_ulp = 2, .calc_diff = 0.5, .note = {}});
  const nlohmann::ordered_json json = rows.to_json();
  ASSERT_EQ(json.size(), 2U);
  EXPECT_EQ(json[0]["output"], "out");
  EXPECT_EQ(json[0]["rows"], 7);
  EXPECT_EQ(json[0]["max_error"], 0.5);
  EXPECT_EQ(json[0]["max_ulp"], 2);
  EXPECT_EQ(json[0]["calc_diff"], 0.5);
  EXPECT_EQ(json[1]["output"], "other");
  EXPECT_NO_THROW(require_equal(json));
}

TEST(CheckedRows, OneDifferenceIsNotForgottenAndEndsTheCommand) {
  CheckedRows rows;
  rows.add("op", "out", 1, {.equal = false, .max_error = 0.5, .note = {}});
  rows.add("op", "out", 1, {.equal = true, .note = {}});
  const nlohmann::ordered_json json = rows.to_json();
  EXPECT_EQ(json[0]["equal"], false);
  testing::internal::CaptureStderr();
  int code = kDone;
  try {
    require_equal(json);
  } catch (const Exit& exit) {
    code = exit.code;
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "ehc: op: 'out' differs from the reference by up to 0.5\n");
  EXPECT_EQ(code, kDifferent);
}

}  // namespace
}  // namespace ehc::cli
