//! Counters of one backend or one device, and their JSON form.

use super::json::Object;

/// Makes the struct, so that no counter can be forgotten when counters are printed, subtracted or added.
macro_rules! counters {
    ($($(#[$doc:meta])* $kind:ident $name:ident,)*) => {
        /// What one backend did since it was made; or what all backends of a device did, or did during a request.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            /// Names and values, in the order of the JSON form.
            pub fn fields(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }

            /// What was counted since these were a copy of `before`. The largest of something stays what it is.
            #[must_use]
            pub fn since(&self, before: &Self) -> Self {
                Self { $($name: counters!(@since $kind self.$name, before.$name),)* }
            }

            /// Adds what somebody else counted.
            pub fn add(&mut self, more: &Self) {
                $(self.$name = counters!(@add $kind self.$name, more.$name);)*
            }
        }
    };
    (@since sum $now:expr, $before:expr) => { $now.saturating_sub($before) };
    (@since most $now:expr, $before:expr) => { $now };
    (@add sum $one:expr, $other:expr) => { $one.saturating_add($other) };
    (@add most $one:expr, $other:expr) => { $one.max($other) };
}

counters! {
    /// Graphs that the host handed over.
    sum graphs,
    /// Their nodes.
    sum nodes,
    /// Parts handed to the inner backend, blocks and single products included.
    sum segments,
    /// MoE blocks run.
    sum blocks,
    /// Most blocks recognised in one graph.
    most blocks_max,
    /// Expert products run outside any recognised block.
    sum unrecognised,
    /// Expert products run by the plain path, inside blocks or not.
    sum plain_nodes,
    /// Bytes of expert weights copied to the inner device by the plain path.
    sum expert_bytes,
    /// Tokens of graphs that decode.
    sum tokens,
    /// Tokens of graphs that hold a prompt.
    sum prompt_tokens,
    /// Pairs of token and expert whose expert lay on the device.
    sum hits,
    /// Those whose expert was computed in RAM.
    sum misses,
    /// Bytes of weights read by the processor for them.
    sum cpu_bytes,
    /// Experts whose loading into the cache began.
    sum uploads,
    /// Experts that had to leave the cache for them.
    sum evictions,
    /// Bytes of weights loaded into the cache.
    sum upload_bytes,
    /// MoE blocks of long passes, whose experts were brought as a whole.
    sum streamed_blocks,
    /// Those of them that ran in slices of their tokens.
    sum sliced_blocks,
    /// Those of shorter passes, of which the experts that were used were brought.
    sum fetched_blocks,
    /// Bytes of device memory that came for a graph: behind compute buffers, and the staging of long passes.
    sum lent_bytes,
    /// Bytes of it that went back.
    sum returned_bytes,
    /// Time from giving misses to the thread team until they were done, in nanoseconds.
    sum team_ns,
    /// Waits for the inner device, one for each block that the cache computes.
    sum waits,
    /// Time spent in them, in nanoseconds.
    sum wait_ns,
    /// Parts that the inner backend captured as CUDA graphs (a lower bound, see `graph::ReplayLedger`).
    sum graphs_captured,
    /// Parts that it replayed.
    sum graphs_replayed,
    /// Captured parts that changed and start over.
    sum graphs_reset,
}

impl Counters {
    /// One line of JSON. `device` and `inner` are device names.
    pub fn json(&self, device: &str, inner: &str) -> String {
        let mut line = Object::new();
        line.text("device", device).text("inner", inner);
        self.write(&mut line);
        line.end()
    }

    /// Adds every counter to an object.
    pub fn write(&self, object: &mut Object) {
        for (name, value) in self.fields() {
            object.number(name, value);
        }
    }

    /// Bytes of weights that went over the link because somebody moved them; what a device reads in place is not counted.
    pub fn link_bytes(&self) -> u64 {
        self.upload_bytes.saturating_add(self.expert_bytes)
    }

    /// Hits as a share of all uses; `None` before the first.
    pub fn hit_share(&self) -> Option<f64> {
        let uses = self.hits.saturating_add(self.misses);
        (uses > 0).then(|| self.hits as f64 / uses as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_json() {
        let counters = Counters { graphs: 2, expert_bytes: 1 << 40, ..Counters::default() };
        let value: serde_json::Value = serde_json::from_str(&counters.json("MoE0", "a\"b\\\n")).unwrap();
        assert_eq!(value["device"], "MoE0");
        assert_eq!(value["inner"], "a\"b\\\n");
        assert_eq!(value["graphs"], 2);
        assert_eq!(value["expert_bytes"], 1_u64 << 40);
        assert_eq!(value.as_object().unwrap().len(), 2 + counters.fields().count());
    }

    #[test]
    fn what_was_counted_meanwhile_adds_up() {
        let before = Counters { graphs: 3, blocks_max: 7, hits: 10, ..Counters::default() };
        let now = Counters { graphs: 5, blocks_max: 9, hits: 25, misses: 5, ..Counters::default() };
        let mut sum = before;
        sum.add(&now.since(&before));
        assert_eq!(sum, now);
        assert_eq!(now.since(&before).hit_share(), Some(0.75));
        assert_eq!(Counters::default().hit_share(), None);
    }
}
