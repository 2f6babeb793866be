#include "ehc/context.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/cuda_support.h"
#include "ehc/engram/compress_ids.h"
#include "ehc/error.h"
#include "ehc/memory.h"

namespace ehc {
namespace {

TEST(Context, CpuThreads) {
  EXPECT_EQ(Context::cpu(3).executor().concurrency(), 3);
  EXPECT_GE(Context::cpu().executor().concurrency(), 1);
  for (const int threads : {-1, 1025}) {
    try {
      (void)Context::cpu(threads);
      FAIL() << threads;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::contract);
      EXPECT_EQ(std::string(e.what()),
                "context: threads: expected 0..1024, got " + std::to_string(threads));
    }
  }
  EXPECT_THROW((void)Context::cpu(std::shared_ptr<Executor>()), Error);
}

// Without a thread nothing would run, and outputs would silently stay as they were.
TEST(Context, AnExecutorHasAtLeastOneThread) {
  struct NoThread final : Executor {
    int concurrency() const override { return 0; }
    void run(int64_t, const std::function<void(int64_t)>&) override {}
  };
  try {
    (void)Context::cpu(std::make_shared<NoThread>());
    FAIL() << "a context without a thread";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::contract);
    EXPECT_STREQ(e.what(), "context: executor: expected a concurrency >= 1, got 0");
  }
}

// What the caller's own threads throw reaches the caller of the operator as it is, and context and
// executor go on working.
TEST(Context, AnExecutorsExceptionPassesThrough) {
  struct Weary final : Executor {
    int concurrency() const override { return 2; }
    void run(int64_t count, const std::function<void(int64_t)>& body) override {
      if (tired) throw std::length_error("no more threads");
      for (int64_t i = 0; i < count; ++i) body(i);
    }
    bool tired = true;
  };
  const auto executor = std::make_shared<Weary>();
  Context context = Context::cpu(executor);
  constexpr int64_t kTokens = 100000;  // enough for two pieces
  std::vector<int32_t> ids(kTokens, 1);
  std::vector<int32_t> table = {4, 5};
  std::vector<int32_t> out(kTokens, 0);
  const engram::CompressIds call{.ids = {ids.data(), DType::i32, {kTokens}},
                                 .table = {table.data(), DType::i32, {2}},
                                 .compressed_ids = {out.data(), DType::i32, {kTokens}}};
  EXPECT_THROW(engram::compress_ids(context, call), std::length_error);
  executor->tired = false;
  engram::compress_ids(context, call);
  EXPECT_EQ(out, std::vector<int32_t>(kTokens, 5));
}

// The library's pool waits for what has begun, then rethrows the first exception of a body.
TEST(Context, ThePoolRethrowsWhatABodyThrows) {
  const Context context = Context::cpu(3);
  std::atomic<int> running = 0;
  EXPECT_THROW(context.executor().run(64,
                                      [&](int64_t i) {
                                        ++running;
                                        if (i == 5) {
                                          --running;
                                          throw std::domain_error("five");
                                        }
                                        --running;
                                      }),
               std::domain_error);
  EXPECT_EQ(running, 0);
  std::atomic<int> done = 0;
  context.executor().run(10, [&](int64_t) { ++done; });
  EXPECT_EQ(done, 10);
}

TEST(Context, CopiesShareThreads) {
  Context context = Context::cpu(2);
  Context copy = context;
  EXPECT_EQ(&copy.executor(), &context.executor());
  copy.set_implementation("reference");
  EXPECT_EQ(context.implementation(), "");
}

TEST(Context, CudaWithoutADeviceSaysSo) {
  if (cuda_support::device_count() > 0) GTEST_SKIP() << "there is a device";
  try {
    (void)Context::cuda(0, nullptr);
    FAIL() << "a context without a device";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::unavailable);
    EXPECT_EQ(std::string(e.what()).rfind("device 'cuda': ", 0), 0U) << e.what();
  }
}

TEST(Context, WorkspaceWithoutAPointerIsEmpty) {
  Context context = Context::cpu(1);
  context.set_workspace(nullptr, 100);
  EXPECT_EQ(context.workspace_bytes(), 0U);
}

TEST(Buffer, OwnsAlignedMemory) {
  const Context context = Context::cpu(1);
  Buffer buffer(context, 100);
  EXPECT_EQ(buffer.bytes(), 100U);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0U);
  std::vector<unsigned char> in(100);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<unsigned char>(i);
  buffer.upload(in.data());
  Buffer moved = std::move(buffer);
  std::vector<unsigned char> out(100);
  moved.download(out.data());
  EXPECT_EQ(in, out);
}

TEST(Buffer, EmptyAndTooLarge) {
  const Context context = Context::cpu(1);
  EXPECT_EQ(Buffer(context, 0).data(), nullptr);
  for (const size_t bytes : {SIZE_MAX, SIZE_MAX - 63, size_t{1} << 62}) {
    try {
      const Buffer buffer(context, bytes);
      FAIL() << bytes;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::internal);
    }
  }
}

}  // namespace
}  // namespace ehc
