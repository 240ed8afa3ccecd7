//! Times of the device, by events that take them.

use std::sync::Arc;

use super::super::DriverError;
use super::super::clock::{Clock, from_earliest};
use super::context::Context;
use super::stream::{Event, Stream};
use crate::abi::inner;

/// The events of one pass.
#[derive(Debug)]
pub(super) struct EventClock {
    context: Arc<Context>,
    stream: Arc<Stream>,
    events: Vec<Event>,
}

impl EventClock {
    pub(super) fn new(context: &Arc<Context>, stream: &Arc<Stream>) -> Self {
        Self { context: Arc::clone(context), stream: Arc::clone(stream), events: Vec::new() }
    }
}

impl Clock for EventClock {
    fn name(&self) -> &'static str {
        "device"
    }

    fn stamp(&mut self) -> Result<usize, DriverError> {
        let event = Event::timed(&self.context)?;
        event.record(&self.stream)?;
        self.events.push(event);
        Ok(self.events.len() - 1)
    }

    fn stamp_inner(&mut self, inner: &inner::Backend) -> Result<usize, DriverError> {
        if !inner.has_events() {
            return Err(DriverError::Unsupported("this backend has no events"));
        }
        let event = Event::timed(&self.context)?;
        // SAFETY: ggml's CUDA events carry a CUevent, and this is one of the same device's primary context.
        unsafe { inner.record_foreign(event.as_ptr()) };
        self.events.push(event);
        Ok(self.events.len() - 1)
    }

    fn read(&self) -> Result<Option<Vec<f64>>, DriverError> {
        for event in self.events.iter().rev() {
            if !event.is_reached()? {
                return Ok(None);
            }
        }
        let Some(first) = self.events.first() else { return Ok(Some(Vec::new())) };
        let times = self.events.iter().map(|event| event.us_after(first)).collect::<Result<Vec<f64>, _>>()?;
        Ok(Some(from_earliest(times)))
    }
}
