#include "comm/descriptor.h"

#include <absl/time/clock.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#include "comm/patience.h"

namespace moe {

bool AwaitReader(int fd, absl::Duration longest) {
  struct stat what = {};
  if (fstat(fd, &what) != 0 || !S_ISFIFO(what.st_mode)) return true;
  Patience patience(longest);
  for (int unread = 0; ioctl(fd, FIONREAD, &unread) == 0 && unread > 0;) {
    if (patience.IsOver(false)) return false;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return true;
}

}  // namespace moe
