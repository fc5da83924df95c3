//! Methods as values, and what `cycler` and `joiner` make.

use super::containers::{List, OBJECT_BYTES, Text};
use super::error::Error;
use super::meter::{Charge, Meter};
use super::value::Value;
use std::cell::Cell;
use std::rc::Rc;

/// A method that is not called at once: `{% set get = dict.get %}`.
#[derive(Debug)]
pub(crate) struct Method {
    /// A text, a list or a dict.
    pub(super) receiver: Value,
    pub(super) name: Text,
    _charge: Charge,
}

/// Has the next of its items whenever it is asked.
#[derive(Debug)]
pub(crate) struct Cycler {
    pub(super) items: List,
    at: Cell<usize>,
    _charge: Charge,
}

/// A separator that is empty the first time.
#[derive(Debug)]
pub(crate) struct Joiner {
    separator: Text,
    is_used: Cell<bool>,
    _charge: Charge,
}

impl Method {
    pub fn value(meter: &Rc<Meter>, receiver: &Value, name: Text) -> Result<Value, Error> {
        let charge = meter.charge(size_of::<Self>() + OBJECT_BYTES)?;
        Ok(Value::Method(Rc::new(Self { receiver: receiver.clone(), name, _charge: charge })))
    }
}

impl Cycler {
    pub fn value(meter: &Rc<Meter>, items: List) -> Result<Value, Error> {
        if items.is_empty() {
            return Err(Error::failed("a cycler has at least one item"));
        }
        let charge = meter.charge(size_of::<Self>() + OBJECT_BYTES)?;
        Ok(Value::Cycler(Rc::new(Self { items, at: Cell::new(0), _charge: charge })))
    }

    pub fn current(&self) -> Value {
        self.items[self.at.get()].clone()
    }

    /// Calls a method. `None` if cyclers have no such method.
    pub fn call(&self, name: &str) -> Option<Value> {
        let current = self.current();
        match name {
            "next" => {
                self.at.set((self.at.get() + 1) % self.items.len());
                Some(current)
            }
            "reset" => {
                self.at.set(0);
                Some(Value::None)
            }
            _ => None,
        }
    }
}

impl Joiner {
    pub fn value(meter: &Rc<Meter>, separator: Text) -> Result<Value, Error> {
        let charge = meter.charge(size_of::<Self>() + OBJECT_BYTES)?;
        Ok(Value::Joiner(Rc::new(Self { separator, is_used: Cell::new(false), _charge: charge })))
    }

    pub fn next(&self, meter: &Rc<Meter>) -> Result<Value, Error> {
        match self.is_used.replace(true) {
            true => Ok(Value::Str(self.separator.clone())),
            false => Value::text(meter, ""),
        }
    }
}
