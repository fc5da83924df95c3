//! What others use: a template, and the variables of one rendering.

use super::ast::Block;
use super::error::Error;
use super::meter::Meter;
use super::parser;
use super::renderer::Renderer;
use super::scope::Scope;
use super::value::{Function, Value};
use serde_json::Value as Json;
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

/// A parsed template.
#[derive(Debug)]
pub struct Template(Block);

/// The variables of one rendering, within the limits of its meter.
#[derive(Debug)]
pub struct Variables {
    meter: Rc<Meter>,
    scope: Rc<Scope>,
}

impl Variables {
    pub fn new(meter: &Rc<Meter>) -> Result<Self, Error> {
        Ok(Self { meter: Rc::clone(meter), scope: Scope::new(meter, None)? })
    }

    /// Sets a variable. It replaces one of the same name.
    pub fn set(&self, name: &str, value: Json) -> Result<(), Error> {
        self.scope.set(&Arc::from(name), Value::from_json(&self.meter, value)?)
    }
}

impl Template {
    pub fn parse(source: &str) -> Result<Self, Error> {
        parser::parse(source).map(Self)
    }

    /// The text of the template with these variables. The functions of templates replace variables of the same name.
    pub fn render(&self, variables: Variables, now: SystemTime) -> Result<String, Error> {
        let Variables { meter, scope } = variables;
        let functions = [
            ("cycler", Function::Cycler),
            ("dict", Function::Dict),
            ("joiner", Function::Joiner),
            ("namespace", Function::Namespace),
            ("raise_exception", Function::RaiseException),
            ("range", Function::Range),
            ("strftime_now", Function::StrftimeNow),
        ];
        for (name, function) in functions {
            scope.set(&Arc::from(name), Value::Function(function))?;
        }
        Renderer::new(&meter, scope, now)?.run(&self.0)
    }
}
