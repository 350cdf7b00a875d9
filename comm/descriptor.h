// Open files, sockets and pipes.
#ifndef MOE_COMM_DESCRIPTOR_H_
#define MOE_COMM_DESCRIPTOR_H_

#include <utility>

#include <absl/time/time.h>
#include <unistd.h>

namespace moe {

// An open file or socket, closed by its owner.
class Descriptor {
 public:
  // `number` as open(2) and socket(2) return it: negative where nothing is open.
  explicit Descriptor(int number = -1) : number_(number) {}
  ~Descriptor() {
    if (is_open()) close(number_);
  }
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }

  bool is_open() const { return number_ >= 0; }
  int number() const { return number_; }

 private:
  int number_;
};

// Waits until the reader of the pipe behind `fd` has taken all that was written, `longest` at most;
// whether it has. True at once for a file or a terminal. A launcher that ends a job closes its
// pipes: what it has not read by then (Hydra: about one report in a hundred) nobody sees.
bool AwaitReader(int fd, absl::Duration longest);

}  // namespace moe

#endif  // MOE_COMM_DESCRIPTOR_H_
