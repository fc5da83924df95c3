//! Jinja, the language of chat templates, for Hugging Face's environment.
//!
//! A template comes with a model's file, so what it may use is limited: every value charges its memory before it is made, all
//! work takes steps, and neither the source nor values nor calls are nested without bound. Whatever a template does, it ends
//! with a text or an error, and the process lives on. Templates cannot reach files, nor other templates.
#![forbid(unsafe_code)]

mod arguments;
mod ast;
mod characters;
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
mod template;
mod value;

pub use error::{Error, ErrorKind};
pub use meter::{Limits, Meter};
pub use template::{Template, Variables};

#[cfg(test)]
mod tests;
