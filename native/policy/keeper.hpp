// Who has the blocks that a policy works on.
#pragma once

#include <cstdint>

#include "policy/numbers.hpp"
#include "policy/pool.hpp"

namespace kvtier::policy {

// An item is the owner's number of a block.
class Keeper {
 public:
  // The name of the prefix that ends with a resident item.
  virtual Key key(Index item) const = 0;
  // Whether a resident item could leave now, were so many of its children in the tier gone.
  virtual bool may_leave(Index item, std::uint32_t num_gone) const = 0;
  // What `key` and `may_leave` look at is wanted soon.
  virtual void prefetch(Index) const {}
  // The resident item with this name, kNone where there is none.
  virtual Index find(Key key) const = 0;

 protected:
  ~Keeper() = default;
};

}  // namespace kvtier::policy
