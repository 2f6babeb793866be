#include "core/file_io.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "core/aligned_buffer.h"
#include "tests/tables/table_test_support.h"

namespace ehc {
using namespace tables;  // test support
namespace {

using testing::HasSubstr;

std::string write_error(const std::string& path, std::string_view content = "content") {
  const std::string_view parts[] = {content};
  return error_text(ErrorKind::io, [&] { write_file(path, parts); });
}

std::string open_error(const std::string& path) {
  return error_text(ErrorKind::io, [&] { const InputFile file(path); });
}

TEST(InputFile, RefusesWhatIsNotARegularFile) {
  const ScratchFolder folder;
  EXPECT_EQ(open_error(folder.file("missing")),
            folder.file("missing") + ": cannot read: No such file or directory");
  EXPECT_EQ(open_error(folder.file("")), folder.file("") + ": cannot read: not a regular file");
  EXPECT_EQ(open_error("/dev/zero"), "/dev/zero: cannot read: not a regular file");
  EXPECT_EQ(open_error(""), "'': not a file name");
  EXPECT_THAT(open_error(folder.file("a") + std::string("\0b", 2)), HasSubstr("not a file name"));
  // A pipe that nobody writes to must not block.
  ASSERT_EQ(::mkfifo(folder.file("pipe").c_str(), 0600), 0);
  EXPECT_EQ(open_error(folder.file("pipe")),
            folder.file("pipe") + ": cannot read: not a regular file");
}

TEST(InputFile, NoticesThatTheFileShrank) {
  const ScratchFolder folder;
  write_bytes(folder.file("f"), "0123456789");
  const InputFile file(folder.file("f"));
  std::filesystem::resize_file(folder.file("f"), 4);
  char bytes[10];
  EXPECT_EQ(error_text(ErrorKind::io, [&] { file.read(0, bytes, file.size()); }),
            folder.file("f") + ": cannot read: the file was shortened meanwhile");
}

TEST(WriteFile, JoinsPartsAndReplaces) {
  const ScratchFolder folder;
  write_bytes(folder.file("f"), "old");
  const std::string_view parts[] = {"ab", "", "cd"};
  write_file(folder.file("f"), parts);
  EXPECT_EQ(read_bytes(folder.file("f")), "abcd");
  EXPECT_EQ(folder.entry_count(), 1u);
}

TEST(WriteFile, ModeFollowsTheUmask) {
  const ScratchFolder folder;
  const mode_t old_mask = ::umask(027);
  const std::string_view parts[] = {"x"};
  write_file(folder.file("f"), parts);
  ::umask(old_mask);
  struct stat status {};
  ASSERT_EQ(::stat(folder.file("f").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0640u);
}

TEST(WriteFile, UnwritableTargets) {
  const ScratchFolder folder;
  EXPECT_EQ(write_error(folder.file("no/such/folder")),
            folder.file("no/such/folder") + ": cannot write: No such file or directory");
  std::filesystem::create_directory(folder.file("d"));
  EXPECT_EQ(write_error(folder.file("d")), folder.file("d") + ": cannot write: not a regular file");
  write_bytes(folder.file("f"), "x");
  EXPECT_EQ(write_error(folder.file("f/g")),
            folder.file("f/g") + ": cannot write: Not a directory");
  EXPECT_EQ(write_error(""), "'': not a file name");
  // Renaming over a device would replace it.
  EXPECT_EQ(write_error("/dev/full"), "/dev/full: cannot write: not a regular file");
  EXPECT_EQ(folder.entry_count(), 2u);
}

TEST(WriteFile, ReadOnlyFolder) {
  constexpr uid_t kNobody = 65534;
  const ScratchFolder folder;
  std::filesystem::create_directory(folder.file("d"));
  ASSERT_EQ(::chmod(folder.file("d").c_str(), 0555), 0);
  ASSERT_EQ(::chmod(folder.file("").c_str(), 0755), 0);
  // Root may write everywhere, so it steps down for a moment.
  const bool is_root = ::geteuid() == 0;
  if (is_root && ::seteuid(kNobody) != 0) GTEST_SKIP() << "root without the right to step down";
  const std::string text = write_error(folder.file("d/f"));
  if (is_root) {
    ASSERT_EQ(::seteuid(0), 0);
  }
  EXPECT_EQ(text, folder.file("d/f") + ": cannot write: Permission denied");
}

// A limit on file sizes fails in the middle of writing, as a full disk does.
TEST(WriteFile, RunningOutOfSpaceLeavesNothingBehind) {
  const ScratchFolder folder;
  write_bytes(folder.file("f"), "old");
  struct rlimit old_limit {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  auto* const old_handler = ::signal(SIGXFSZ, SIG_IGN);
  struct rlimit limit = old_limit;
  limit.rlim_cur = 1000;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const std::string text = write_error(folder.file("f"), std::string(5000, 'x'));
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  ::signal(SIGXFSZ, old_handler);
  EXPECT_EQ(text, folder.file("f") + ": cannot write: File too large");
  EXPECT_EQ(read_bytes(folder.file("f")), "old");
  EXPECT_EQ(folder.entry_count(), 1u);
}

TEST(AlignedBuffer, EmptyAndTooLarge) {
  const AlignedBuffer empty(0);
  EXPECT_NE(empty.data(), nullptr);
  for (const uint64_t bytes : {UINT64_MAX, UINT64_MAX / 2}) {
    EXPECT_THAT(error_text(ErrorKind::internal, [&] { const AlignedBuffer buffer(bytes); }),
                HasSubstr("cannot allocate"));
  }
}

}  // namespace
}  // namespace ehc
