#include "net/receive_values.hpp"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstring>
#include <vector>

namespace kvtier::net {
namespace {

constexpr std::string_view kEnd = "\r\n";
constexpr std::size_t kLeastReply = 4;  // bytes: nothing is shorter that comes where a value is due
constexpr double kLeastShare = 0.75;    // of what a call may take, while so much time is left
constexpr double kLeastWaitS = 0.001;
#ifdef IOV_MAX
constexpr std::size_t kMostParts = IOV_MAX;
#else
constexpr std::size_t kMostParts = 1024;
#endif

// A socket, and how long it may take.
class Line {
 public:
  Line(int fd, double until) : fd_(fd), until_(until) {
    timeval limit{};
    socklen_t size = sizeof limit;
    if (getsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, &size) == 0)
      limit_s_ = static_cast<double>(limit.tv_sec) + static_cast<double>(limit.tv_usec) / 1e6;
  }

  // Some bytes, one at least, of those that `parts` have room for; all of them, if `whole`. The
  // number of them; 0 with an error.
  std::size_t receive(iovec* parts, std::size_t num_parts, bool whole) {
    while (limit()) {
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = std::min(num_parts, kMostParts);
      const ssize_t num = recvmsg(fd_, &message, whole ? MSG_WAITALL : 0);
      if (num > 0) return static_cast<std::size_t>(num);
      if (num < 0 && errno == EINTR) continue;
      const bool late = num < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
      error = num == 0 ? ECONNRESET : late ? ETIMEDOUT : errno;
      return 0;
    }
    error = ETIMEDOUT;
    return 0;
  }

  int error = 0;

 private:
  // Whether there is time left; the system does not wait for much longer than that.
  bool limit() {
    const std::chrono::duration<double> now = std::chrono::steady_clock::now().time_since_epoch();
    const double left_s = until_ - now.count();
    if (left_s <= 0) return false;
    if (limit_s_ > 0 && left_s >= kLeastShare * limit_s_) return true;
    limit_s_ = std::max(left_s, kLeastWaitS);
    timeval limit{};
    limit.tv_sec = static_cast<decltype(limit.tv_sec)>(limit_s_);
    limit.tv_usec = static_cast<decltype(limit.tv_usec)>(std::fmod(limit_s_, 1.0) * 1e6);
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    return true;
  }

  int fd_;
  double until_;
  double limit_s_ = 0;  // of the system's calls; 0: none
};

class Reader {
 public:
  Reader(int fd, std::string_view line, std::string_view held, const Places& places,
         std::size_t num_due, double until)
      : socket_(fd, until), line_(line), rest_(held), places_(places), num_due_(num_due) {}

  Received read() {
    std::size_t num = 0;
    while (num < places_.num_values && socket_.error == 0 && is_next()) {
      const std::size_t num_behind = places_.num_values - num - 1 + num_due_;
      if (!read_value(num, std::min(num_behind * kLeastReply, line_.size()))) break;
      ++num;
    }
    return {num, std::move(rest_), socket_.error};
  }

 private:
  // Whether a value comes next; its first line is gone then.
  bool is_next() {
    while (rest_.size() < line_.size() && line_.starts_with(rest_))
      if (!receive_more(line_.size() - rest_.size())) return false;
    if (!std::string_view(rest_).starts_with(line_)) return false;
    rest_.erase(0, line_.size());
    return true;
  }

  // The next value, and `num_ahead` bytes behind its end, which may fail where the value does not.
  bool read_value(std::size_t number, std::size_t num_ahead) {
    std::size_t held = 0;
    parts_.clear();
    for (std::size_t i = 0; i < places_.num_pieces; ++i) {
      const std::size_t at = number * places_.num_pieces + i;
      auto* const begin = reinterpret_cast<char*>(places_.address[at]);
      const std::size_t size = places_.size[at];
      const std::size_t some = std::min(size, rest_.size() - held);
      if (some > 0) std::memcpy(begin, rest_.data() + held, some);
      held += some;
      if (some < size) parts_.push_back({begin + some, size - some});
    }
    rest_.erase(0, held);
    const std::size_t num_held = rest_.size();
    const std::size_t num_wanted = std::max(num_held, kEnd.size() + num_ahead);
    rest_.resize(num_wanted);
    parts_.push_back({rest_.data() + num_held, num_wanted - num_held});
    if (!receive_parts()) rest_.resize(num_wanted - parts_.back().iov_len);
    if (!rest_.starts_with(kEnd)) {
      if (socket_.error == 0) socket_.error = EPROTO;
      return false;
    }
    rest_.erase(0, kEnd.size());
    return true;
  }

  bool receive_parts() {
    std::size_t first = 0;
    while (first < parts_.size()) {
      iovec& part = parts_[first];
      if (part.iov_len == 0) {
        ++first;
        continue;
      }
      std::size_t num = socket_.receive(&part, parts_.size() - first, true);
      if (num == 0) return false;
      while (num > 0) {
        iovec& next = parts_[first];
        const std::size_t some = std::min(num, next.iov_len);
        next.iov_base = static_cast<char*>(next.iov_base) + some;
        next.iov_len -= some;
        num -= some;
        if (next.iov_len == 0) ++first;
      }
    }
    return true;
  }

  bool receive_more(std::size_t num_bytes) {
    const std::size_t num_held = rest_.size();
    rest_.resize(num_held + num_bytes);
    iovec part{rest_.data() + num_held, num_bytes};
    const std::size_t num = socket_.receive(&part, 1, false);
    rest_.resize(num_held + num);
    return num > 0;
  }

  Line socket_;
  std::string_view line_;
  std::string rest_;  // has come and was not read
  const Places& places_;
  std::size_t num_due_;
  std::vector<iovec> parts_;
};

}  // namespace

Received receive_values(int fd, std::string_view line, std::string_view held, const Places& places,
                        std::size_t num_due, double until) {
  return Reader(fd, line, held, places, num_due, until).read();
}

}  // namespace kvtier::net
