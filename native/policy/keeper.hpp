// Owner of the blocks that a policy works on.
#pragma once

#include <cstdint>

#include "policy/numbers.hpp"
#include "policy/pool.hpp"

namespace kvtier::policy {

// An item is the owner's number of a block.
class Keeper {
 public:
  // Return the name of the prefix that ends with a resident item.
  virtual Key key(Index item) const = 0;
  // Whether a resident item could be evicted now, if `num_gone` of its children in the tier were
  // gone.
  virtual bool may_leave(Index item, std::uint32_t num_gone) const = 0;
  // Prefetch the memory that `key` and `may_leave` read.
  virtual void prefetch(Index) const {}
  // Return the resident item with this name; kNone if there is none.
  virtual Index find(Key key) const = 0;

 protected:
  ~Keeper() = default;
};

}  // namespace kvtier::policy
