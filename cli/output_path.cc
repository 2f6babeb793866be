#include "cli/output_path.h"

#include <sys/stat.h>
#include <unistd.h>

#include "ehc/error.h"

namespace ehc::cli {

void require_writable(const std::string& path) {
  struct stat info {};
  if (stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    throw Error(ErrorKind::io, path + ": expected a regular file to replace");
  }
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  if (stat(folder.c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) {
    throw Error(ErrorKind::io, path + ": the folder does not exist");
  }
  if (access(folder.c_str(), W_OK) != 0) {
    throw Error(ErrorKind::io, path + ": the folder is not writable");
  }
}

}  // namespace ehc::cli
