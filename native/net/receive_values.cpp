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
#include <utility>
#include <vector>

#include "crc/crc32c.hpp"

namespace kvtier::net {
namespace {

constexpr std::string_view kEnd = "\r\n";
constexpr std::size_t kLeastReply = 3;  // bytes: an error without words, -\r\n
constexpr double kLeastShare = 0.75;    // SO_RCVTIMEO is set again below this share of it
constexpr double kLeastWaitS = 0.001;
constexpr std::size_t kStepBytes = std::size_t{128} << 10;  // stay in a cache until they are checked
#ifdef IOV_MAX
constexpr std::size_t kMaxParts = IOV_MAX;
#else
constexpr std::size_t kMaxParts = 1024;
#endif

// A socket with a deadline.
class Line {
 public:
  Line(int fd, double until) : fd_(fd), until_(until) {
    timeval limit{};
    socklen_t size = sizeof limit;
    if (getsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, &size) == 0)
      limit_s_ = static_cast<double>(limit.tv_sec) + static_cast<double>(limit.tv_usec) / 1e6;
  }

  // Fill `parts`: with at least one byte, or all of them if `whole`. Return the number of bytes; 0
  // with an error.
  std::size_t receive(iovec* parts, std::size_t num_parts, bool whole) {
    while (limit()) {
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = num_parts;
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
  // Limit the system's waiting to about the time that is left. Return whether there is any.
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
    std::vector<std::uint32_t> crcs;
    while (crcs.size() < places_.num_values && socket_.error == 0 && is_next()) {
      const std::size_t num_behind = places_.num_values - crcs.size() - 1 + num_due_;
      if (!read_value(crcs.size(), std::min(num_behind * kLeastReply, line_.size()))) break;
      crcs.push_back(crc_);
    }
    return {std::move(crcs), std::move(rest_), socket_.error};
  }

 private:
  // Return whether a value is next, and consume its first line.
  bool is_next() {
    while (rest_.size() < line_.size() && line_.starts_with(rest_))
      if (!receive_more(line_.size() - rest_.size())) return false;
    if (!std::string_view(rest_).starts_with(line_)) return false;
    rest_.erase(0, line_.size());
    return true;
  }

  // Receive the next value, and `num_ahead` bytes behind its end, which may fail separately.
  bool read_value(std::size_t number, std::size_t num_ahead) {
    std::size_t held = 0;
    crc_ = 0;
    parts_.clear();
    for (std::size_t i = 0; i < places_.num_pieces; ++i) {
      const std::size_t at = number * places_.num_pieces + i;
      Part part{reinterpret_cast<std::byte*>(places_.address[at]), places_.size[at],
                i >= places_.num_heads};
      const std::size_t some = std::min(part.left, rest_.size() - held);
      if (some > 0) std::memcpy(part.begin, rest_.data() + held, some);
      held += some;
      fill(part, some);
      if (part.left > 0) parts_.push_back(part);
    }
    rest_.erase(0, held);
    const std::size_t num_held = rest_.size();
    const std::size_t num_wanted = std::max(num_held, kEnd.size() + num_ahead);
    rest_.resize(num_wanted);
    auto* const behind = reinterpret_cast<std::byte*>(rest_.data() + num_held);
    if (num_wanted > num_held) parts_.push_back({behind, num_wanted - num_held, false});
    if (!receive_parts()) rest_.resize(num_wanted - parts_.back().left);
    if (!rest_.starts_with(kEnd)) {
      if (socket_.error == 0) socket_.error = EPROTO;
      return false;
    }
    rest_.erase(0, kEnd.size());
    return true;
  }

  // The rest of a piece that is not filled yet.
  struct Part {
    std::byte* begin;
    std::size_t left;
    bool is_checked;
  };

  // Note that the next `num` bytes of a part have arrived.
  void fill(Part& part, std::size_t num) {
    if (part.is_checked && num > 0) crc_ = crc::crc32c(part.begin, num, crc_);
    part.begin += num;
    part.left -= num;
  }

  bool receive_parts() {
    for (std::size_t first = 0; first < parts_.size();) {
      step_.clear();
      std::size_t left = kStepBytes;
      for (std::size_t at = first; at < parts_.size() && left > 0 && step_.size() < kMaxParts; ++at) {
        const std::size_t some = std::min(left, parts_[at].left);
        step_.push_back({parts_[at].begin, some});
        left -= some;
      }
      std::size_t num = socket_.receive(step_.data(), step_.size(), true);
      if (num == 0) return false;
      while (num > 0) {
        const std::size_t some = std::min(num, parts_[first].left);
        fill(parts_[first], some);
        num -= some;
        if (parts_[first].left == 0) ++first;
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
  std::string rest_;  // received and not used yet
  const Places& places_;
  std::size_t num_due_;
  std::vector<Part> parts_;
  std::vector<iovec> step_;  // parts of the current system call
  std::uint32_t crc_ = 0;    // of the current value
};

}  // namespace

Received receive_values(int fd, std::string_view line, std::string_view held, const Places& places,
                        std::size_t num_due, double until) {
  return Reader(fd, line, held, places, num_due, until).read();
}

}  // namespace kvtier::net
