//! Jinja, the language of chat templates, for Hugging Face's environment.
//!
//! A template comes with a model's file, so what it may use is limited: every value charges its memory before it is made, all
//! work takes steps, and neither the source nor values nor calls are nested without bound. Whatever a template does, it ends
//! with a text or an error, and the process lives on. Templates cannot reach files, nor other templates.

mod arguments;
mod ast;
mod containers;
mod error;
mod evaluate;
mod expression_parser;
mod filters;
mod format;
mod functions;
mod lexer;
mod list_filters;
mod meter;
mod methods;
mod namespace;
mod objects;
mod operators;
mod parser;
mod predicates;
mod print;
mod renderer;
mod scope;
mod search;
mod split;
mod value;

pub(crate) use error::{Error, ErrorKind};
pub(crate) use meter::{Limits, Meter};
pub(crate) use value::Value;

use renderer::Renderer;
use scope::Scope;
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;
use value::Function;

/// A parsed template.
#[derive(Debug)]
pub(crate) struct Template(ast::Block);

impl Template {
    pub fn parse(source: &str) -> Result<Self, Error> {
        parser::parse(source).map(Self)
    }

    /// The text of the template with these variables. Of two with one name, the last counts; functions count more.
    pub fn render(
        &self,
        meter: &Rc<Meter>,
        variables: impl IntoIterator<Item = (Arc<str>, Value)>,
        now: SystemTime,
    ) -> Result<String, Error> {
        let scope = Scope::new(meter, None)?;
        let functions = [
            ("cycler", Function::Cycler),
            ("dict", Function::Dict),
            ("joiner", Function::Joiner),
            ("namespace", Function::Namespace),
            ("raise_exception", Function::RaiseException),
            ("range", Function::Range),
            ("strftime_now", Function::StrftimeNow),
        ];
        for (name, value) in variables {
            scope.set(&name, value)?;
        }
        for (name, function) in functions {
            scope.set(&Arc::from(name), Value::Function(function))?;
        }
        Renderer::new(meter, scope, now)?.run(&self.0)
    }
}

#[cfg(test)]
mod tests;
