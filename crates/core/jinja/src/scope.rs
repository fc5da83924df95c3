//! Variables, by the scopes in which they are set.

use super::error::Error;
use super::meter::{Charge, Meter};
use super::value::Value;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

/// The memory of a scope, and of a variable in it.
const SCOPE_BYTES: usize = 192;
const VARIABLE_BYTES: usize = 2 * size_of::<(Arc<str>, Value)>();

#[derive(Debug)]
pub(crate) struct Scope {
    variables: RefCell<HashMap<Arc<str>, Value>>,
    charge: RefCell<Charge>,
    parent: Option<Rc<Scope>>,
}

impl Scope {
    pub fn new(meter: &Rc<Meter>, parent: Option<Rc<Scope>>) -> Result<Rc<Self>, Error> {
        let charge = RefCell::new(meter.charge(SCOPE_BYTES)?);
        Ok(Rc::new(Self { variables: RefCell::default(), charge, parent }))
    }

    pub fn get(&self, name: &str) -> Option<Value> {
        let mut scope = Some(self);
        while let Some(here) = scope {
            if let Some(value) = here.variables.borrow().get(name) {
                return Some(value.clone());
            }
            scope = here.parent.as_deref();
        }
        None
    }

    pub fn set(&self, name: &Arc<str>, value: Value) -> Result<(), Error> {
        let known = self.variables.borrow().contains_key(name);
        if !known {
            self.charge.borrow_mut().grow(VARIABLE_BYTES)?;
        }
        let replaced = self.variables.borrow_mut().insert(Arc::clone(name), value);
        drop(replaced);
        Ok(())
    }
}
