//! The limits of a rendering: its steps, its time, and the memory of what it makes.
//!
//! Every value charges its memory before it is allocated and gives it back when it is dropped, so the limit holds at every
//! moment. Names count as values, unless the template itself contains them. Work that depends on the size of a value takes
//! steps in proportion to it.

use super::error::Error;
use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// The limits of one rendering.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub steps_max: u64,
    /// Values and output together.
    pub bytes_max: usize,
    pub time_max: Duration,
}

/// Bytes of text that are read or copied in one step.
const BYTES_PER_STEP: usize = 64;
/// The clock is read once in this many steps.
const STEPS_PER_CLOCK: u64 = 1 << 14;

/// What is left of the limits.
#[derive(Debug)]
pub struct Meter {
    limits: Limits,
    steps: Cell<u64>,
    bytes: Cell<usize>,
    until: Instant,
}

impl Meter {
    pub fn new(limits: Limits) -> Rc<Self> {
        let until = Instant::now() + limits.time_max;
        Rc::new(Self { limits, steps: Cell::new(limits.steps_max), bytes: Cell::new(limits.bytes_max), until })
    }

    /// Takes `count` steps.
    pub(crate) fn steps(&self, count: usize) -> Result<(), Error> {
        let left = self.steps.get();
        let Some(rest) = left.checked_sub(count as u64) else {
            self.steps.set(0);
            return Err(Error::limit(format!("it takes more than {} steps", self.limits.steps_max)));
        };
        self.steps.set(rest);
        if left / STEPS_PER_CLOCK != rest / STEPS_PER_CLOCK && Instant::now() > self.until {
            return Err(Error::limit(format!("it takes longer than {:?}", self.limits.time_max)));
        }
        Ok(())
    }

    #[cfg(test)]
    pub(crate) fn steps_taken(&self) -> u64 {
        self.limits.steps_max - self.steps.get()
    }

    #[cfg(test)]
    pub(crate) fn bytes_taken(&self) -> usize {
        self.limits.bytes_max - self.bytes.get()
    }

    /// Takes the steps of reading or copying this many bytes.
    pub(crate) fn read(&self, bytes: usize) -> Result<(), Error> {
        self.steps(1 + bytes / BYTES_PER_STEP)
    }

    /// Takes memory, until the charge is dropped.
    pub(crate) fn charge(self: &Rc<Self>, bytes: usize) -> Result<Charge, Error> {
        let mut charge = Charge { meter: Rc::clone(self), bytes: 0 };
        charge.grow(bytes)?;
        Ok(charge)
    }
}

/// Memory that is in use.
#[derive(Debug)]
pub(crate) struct Charge {
    meter: Rc<Meter>,
    bytes: usize,
}

impl Charge {
    /// Takes more memory.
    pub fn grow(&mut self, bytes: usize) -> Result<(), Error> {
        let Some(rest) = self.meter.bytes.get().checked_sub(bytes) else {
            let limit = self.meter.limits.bytes_max;
            return Err(Error::limit(format!("it takes more than {limit} bytes of memory")));
        };
        self.meter.bytes.set(rest);
        self.bytes += bytes;
        Ok(())
    }

    pub fn meter(&self) -> &Rc<Meter> {
        &self.meter
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.meter.bytes.set(self.meter.bytes.get() + self.bytes);
    }
}
