//! Namespaces: `{% set namespace.name = value %}`.
//!
//! A namespace may hold itself, or another one that holds it. So every namespace lives until its rendering ends, and then
//! lets go of its values: no cycle remains, and dropping a long chain of them does not recurse.

use super::containers::Text;
use super::error::Error;
use super::meter::{Charge, Meter};
use super::value::Value;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// The memory of a namespace, with the smallest map that is not empty, and of a variable in it.
const NAMESPACE_BYTES: usize = 320;
const VARIABLE_BYTES: usize = 2 * size_of::<(Text, Value)>();

/// Variables that are seen wherever the namespace is.
#[derive(Debug)]
pub(crate) struct Namespace {
    values: RefCell<HashMap<Text, Value>>,
    charge: RefCell<Charge>,
}

impl Namespace {
    fn new(meter: &Rc<Meter>) -> Result<Self, Error> {
        Ok(Self { values: RefCell::default(), charge: RefCell::new(meter.charge(NAMESPACE_BYTES)?) })
    }

    pub fn get(&self, name: &str) -> Result<Option<Value>, Error> {
        self.charge.borrow().meter().read(name.len())?;
        Ok(self.values.borrow().get(name).cloned())
    }

    pub fn set(&self, name: Text, value: Value) -> Result<(), Error> {
        value.depth_within()?;
        self.charge.borrow().meter().read(name.len())?;
        let known = self.values.borrow().contains_key(&name);
        if !known {
            self.charge.borrow_mut().grow(VARIABLE_BYTES)?;
        }
        let replaced = self.values.borrow_mut().insert(name, value);
        drop(replaced);
        Ok(())
    }
}

/// The namespaces of a rendering.
pub(super) struct Namespaces {
    all: Vec<Rc<Namespace>>,
    charge: Charge,
}

impl Namespaces {
    pub fn new(meter: &Rc<Meter>) -> Result<Self, Error> {
        Ok(Self { all: Vec::new(), charge: meter.charge(0)? })
    }

    /// Makes an empty namespace.
    pub fn make(&mut self) -> Result<Rc<Namespace>, Error> {
        self.charge.grow(2 * size_of::<Rc<Namespace>>())?;
        let namespace = Rc::new(Namespace::new(self.charge.meter())?);
        self.all.push(Rc::clone(&namespace));
        Ok(namespace)
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for namespace in &self.all {
            drop(namespace.values.take());
        }
    }
}
