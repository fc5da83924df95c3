//! The arguments of a call.

use super::containers::Text;
use super::error::{Error, quoted};
use super::meter::{Charge, Meter};
use super::value::Value;
use std::rc::Rc;

pub(super) struct Arguments {
    pub positional: Vec<Value>,
    pub keywords: Vec<(Text, Value)>,
    charge: Charge,
}

impl Arguments {
    pub fn new(meter: &Rc<Meter>) -> Result<Self, Error> {
        Ok(Self { positional: Vec::new(), keywords: Vec::new(), charge: meter.charge(0)? })
    }

    pub fn push(&mut self, value: Value) -> Result<(), Error> {
        self.charge.meter().steps(1)?;
        self.charge.grow(2 * size_of::<Value>())?;
        self.positional.push(value);
        Ok(())
    }

    pub fn push_keyword(&mut self, name: Text, value: Value) -> Result<(), Error> {
        self.charge.meter().steps(1)?;
        self.charge.grow(2 * size_of::<(Text, Value)>())?;
        self.keywords.push((name, value));
        Ok(())
    }

    pub fn keyword(&self, name: &str) -> Result<Option<&Value>, Error> {
        self.charge.meter().steps(self.keywords.len())?;
        Ok(self.keywords.iter().find(|(keyword, _)| **keyword == *name).map(|(_, value)| value))
    }

    /// The values of these parameters, by position or by name. Further arguments are an error.
    pub fn bind<const N: usize>(&self, names: [&str; N]) -> Result<[Option<&Value>; N], Error> {
        if self.positional.len() > N {
            return Err(Error::failed(format!("it takes at most {N} arguments")));
        }
        self.charge.meter().steps(self.keywords.len())?;
        if let Some((name, _)) = self.keywords.iter().find(|(name, _)| !names.contains(&&**name)) {
            return Err(Error::failed(format!("it takes no argument {}", quoted(name))));
        }
        let mut values = [None; N];
        for (index, name) in names.into_iter().enumerate() {
            values[index] = match self.positional.get(index) {
                Some(value) => Some(value),
                None => self.keyword(name)?,
            };
        }
        Ok(values)
    }

    /// The arguments without the first positional one.
    pub fn without_first(mut self) -> (Option<Value>, Self) {
        let first = (!self.positional.is_empty()).then(|| self.positional.remove(0));
        (first, self)
    }
}
