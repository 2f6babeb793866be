#include "core/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/parallel.h"
#include "ehc/error.h"

namespace ehc {
namespace {

TEST(ThreadPool, CallsEveryIndexOnce) {
  for (int threads = 1; threads <= 8; ++threads) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.concurrency(), threads);
    for (const int64_t count : {0, 1, 2, 7, 8, 9, 1000}) {
      std::vector<std::atomic<int>> calls(static_cast<size_t>(count));
      pool.run(count, [&](int64_t i) { ++calls[static_cast<size_t>(i)]; });
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(calls[static_cast<size_t>(i)], 1) << threads << " threads, index " << i;
      }
    }
  }
}

TEST(ThreadPool, SurvivesManyShortRuns) {
  ThreadPool pool(4);
  std::atomic<int64_t> sum = 0;
  for (int run = 0; run < 3000; ++run) pool.run(4, [&](int64_t i) { sum += i; });
  EXPECT_EQ(sum, 3000 * 6);
}

TEST(ThreadPool, RethrowsAnExceptionAfterAllAreDone) {
  for (const int threads : {1, 2, 8}) {
    ThreadPool pool(threads);
    std::atomic<int> running = 0;
    try {
      pool.run(50, [&](int64_t i) {
        ++running;
        if (i == 17) {
          --running;
          throw std::runtime_error("index 17");
        }
        --running;
      });
      FAIL() << "the exception is lost";
    } catch (const std::runtime_error& e) {
      EXPECT_STREQ(e.what(), "index 17");
    }
    EXPECT_EQ(running, 0);
    int calls = 0;
    pool.run(1, [&](int64_t) { ++calls; });
    std::atomic<int> more = 0;
    pool.run(20, [&](int64_t) { ++more; });
    EXPECT_EQ(calls + more, 21) << "the pool works on";
  }
}

TEST(ThreadPool, CallersTakeTurns) {
  ThreadPool pool(3);
  std::atomic<int64_t> sum = 0;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int run = 0; run < 100; ++run) pool.run(10, [&](int64_t i) { sum += i; });
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum, 4 * 100 * 45);
}

// An executor of a host program: everything on the calling thread, in reverse.
class ReverseExecutor final : public Executor {
 public:
  [[nodiscard]] int concurrency() const override { return 5; }
  void run(int64_t count, const std::function<void(int64_t)>& body) override {
    ++runs;
    for (int64_t i = count - 1; i >= 0; --i) body(i);
  }
  int runs = 0;
};

TEST(ParallelFor, UsesTheCallersExecutor) {
  auto executor = std::make_shared<ReverseExecutor>();
  Context context = Context::cpu(executor);
  std::vector<int> calls(103);
  parallel_for(context, 103, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) ++calls[static_cast<size_t>(i)];
  });
  EXPECT_EQ(executor->runs, 1);
  EXPECT_EQ(calls, std::vector<int>(103, 1));
}

TEST(ParallelFor, CoversTheRangeInPiecesOfAtLeastTheGrain) {
  for (int threads = 1; threads <= 8; ++threads) {
    Context context = Context::cpu(threads);
    for (const int64_t count : {0, 1, 7, 64, 100}) {
      for (const int64_t grain : {0, 1, 16, 1000}) {
        std::vector<std::atomic<int>> calls(static_cast<size_t>(count));
        std::atomic<int> pieces = 0;
        parallel_for(context, count, grain, [&](int64_t begin, int64_t end) {
          ++pieces;
          EXPECT_TRUE(end - begin >= std::min(count, std::max<int64_t>(1, grain)));
          for (int64_t i = begin; i < end; ++i) ++calls[static_cast<size_t>(i)];
        });
        EXPECT_LE(pieces, threads);
        for (const auto& n : calls) ASSERT_EQ(n, 1);
      }
    }
  }
}

TEST(ParallelChunks, AreTheSameForAnyNumberOfThreads) {
  for (int threads = 1; threads <= 8; ++threads) {
    Context context = Context::cpu(threads);
    std::vector<std::pair<int64_t, int64_t>> chunks(4);
    parallel_chunks(context, 100, 32, [&](int64_t chunk, int64_t begin, int64_t end) {
      chunks[static_cast<size_t>(chunk)] = {begin, end};
    });
    EXPECT_EQ(chunks,
              (std::vector<std::pair<int64_t, int64_t>>{{0, 32}, {32, 64}, {64, 96}, {96, 100}}));
  }
}

// A body that uses the context again would otherwise wait for itself.
TEST(ParallelFor, MayBeNested) {
  for (const int threads : {1, 2, 8}) {
    Context context = Context::cpu(threads);
    std::atomic<int> calls = 0;
    parallel_for(context, 8, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        parallel_for(context, 8, 1,
                     [&](int64_t b, int64_t e) { calls += static_cast<int>(e - b); });
      }
    });
    EXPECT_EQ(calls, 64);
  }
}

TEST(ParallelFor, PassesExceptionsOn) {
  Context context = Context::cpu(4);
  EXPECT_THROW(parallel_for(context, 100, 1,
                            [](int64_t, int64_t end) {
                              if (end == 100) throw Error(ErrorKind::internal, "last piece");
                            }),
               Error);
}

}  // namespace
}  // namespace ehc
