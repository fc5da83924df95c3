//! The values of a template.
//!
//! Lists, dicts and texts never change after they are made, so only a namespace can hold itself, and nothing walks into
//! one. Every value knows its depth, which is limited: what walks a value may recurse.

use super::ast::{ForLoop, MacroDefinition};
use super::containers::{Dict, DictBuilder, List, ListBuilder, OBJECT_BYTES, Text, TextBuilder};
use super::error::Error;
use super::meter::{Charge, Meter};
use super::namespace::Namespace;
use super::objects::{Cycler, Joiner, Method};
use super::scope::Scope;
use serde_json::Value as Json;
use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;

/// How deep lists and dicts may be nested. The JSON of a request is at most 128 deep.
const DEPTH_MAX: u32 = 160;

#[derive(Clone, Debug)]
pub(crate) enum Value {
    /// The name of what is missing, if it has one.
    Undefined(Option<Text>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Text),
    List(List),
    Dict(Dict),
    Namespace(Rc<Namespace>),
    Loop(Rc<LoopState>),
    Macro(Rc<Macro>),
    Function(Function),
    Method(Rc<Method>),
    Cycler(Rc<Cycler>),
    Joiner(Rc<Joiner>),
}

/// The functions that every template can call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Function {
    Cycler,
    Dict,
    Joiner,
    Namespace,
    RaiseException,
    Range,
    StrftimeNow,
}

impl Value {
    /// A text that the template itself contains.
    pub fn literal(text: &Arc<str>) -> Self {
        Self::Str(Text::literal(text))
    }

    pub fn text(meter: &Rc<Meter>, text: &str) -> Result<Self, Error> {
        let mut builder = TextBuilder::new(meter)?;
        builder.push_str(text)?;
        Ok(builder.finish())
    }

    /// Takes over a text of the caller.
    fn owned_text(meter: &Rc<Meter>, text: String) -> Result<Self, Error> {
        Ok(Self::Str(Text::owned(meter, text)?))
    }

    pub fn from_json(meter: &Rc<Meter>, json: Json) -> Result<Self, Error> {
        Ok(match json {
            Json::Null => Self::None,
            Json::Bool(value) => Self::Bool(value),
            Json::Number(number) => match (number.as_i64(), number.as_u64()) {
                (Some(value), _) => Self::Int(value.into()),
                (_, Some(value)) => Self::Int(value.into()),
                _ => Self::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(text) => Self::owned_text(meter, text)?,
            Json::Array(items) => {
                let mut list = ListBuilder::new(meter)?;
                for item in items {
                    list.push(Self::from_json(meter, item)?)?;
                }
                list.finish()
            }
            Json::Object(entries) => {
                let mut dict = DictBuilder::new(meter)?;
                for (key, value) in entries {
                    dict.insert(Self::owned_text(meter, key)?, Self::from_json(meter, value)?)?;
                }
                dict.finish()
            }
        })
    }

    /// What is missing has a name that the template contains.
    pub fn undefined(name: &Arc<str>) -> Self {
        Self::Undefined(Some(Text::literal(name)))
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::Str(text) => Some(text),
            _ => None,
        }
    }

    pub fn as_int(&self) -> Option<i128> {
        match *self {
            Self::Int(value) => Some(value),
            Self::Bool(value) => Some(value.into()),
            _ => None,
        }
    }

    pub fn as_float(&self) -> Option<f64> {
        match *self {
            Self::Float(value) => Some(value),
            _ => self.as_int().map(|value| value as f64),
        }
    }

    pub fn is_undefined(&self) -> bool {
        matches!(self, Self::Undefined(_))
    }

    pub fn is_true(&self) -> bool {
        match self {
            Self::Undefined(_) | Self::None => false,
            Self::Bool(value) => *value,
            Self::Int(value) => *value != 0,
            Self::Float(value) => *value != 0.0,
            Self::Str(text) => !text.is_empty(),
            Self::List(list) => !list.is_empty(),
            Self::Dict(dict) => !dict.entries().is_empty(),
            Self::Namespace(_)
            | Self::Loop(_)
            | Self::Macro(_)
            | Self::Function(_)
            | Self::Method(_)
            | Self::Cycler(_)
            | Self::Joiner(_) => true,
        }
    }

    /// The name of the type, as Python has it.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::Undefined(_) => "undefined",
            Self::None => "none",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Str(_) => "str",
            Self::List(list) if list.is_tuple() => "tuple",
            Self::List(_) => "list",
            Self::Dict(_) => "dict",
            Self::Namespace(_) => "namespace",
            Self::Loop(_) => "loop",
            Self::Macro(_) => "macro",
            Self::Function(_) => "function",
            Self::Method(_) => "method",
            Self::Cycler(_) => "cycler",
            Self::Joiner(_) => "joiner",
        }
    }

    fn depth(&self) -> u32 {
        match self {
            Self::List(list) => list.depth(),
            Self::Dict(dict) => dict.depth(),
            Self::Method(method) => method.receiver.depth(),
            Self::Cycler(cycler) => cycler.items.depth(),
            _ => 0,
        }
    }

    /// Checks that the value may be within another one, and returns the depth of that.
    pub(super) fn depth_within(&self) -> Result<u32, Error> {
        match self {
            // A loop keeps values, so it could hold itself.
            Self::Loop(_) => Err(Error::failed("a loop cannot be within another value")),
            _ if self.depth() == DEPTH_MAX => {
                Err(Error::limit(format!("its values are nested deeper than {DEPTH_MAX}")))
            }
            _ => Ok(self.depth() + 1),
        }
    }
}

/// A macro. It sees the variables of the scope in which it was defined, while that exists.
#[derive(Debug)]
pub(crate) struct Macro {
    pub(super) definition: Arc<MacroDefinition>,
    pub(super) scope: Weak<Scope>,
    pub(super) _charge: Charge,
}

/// The variable `loop`.
#[derive(Debug)]
pub(crate) struct LoopState {
    pub(super) items: List,
    pub(super) index: Cell<usize>,
    pub(super) depth: usize,
    /// For `loop(…)`.
    pub(super) recursive: Option<Arc<ForLoop>>,
    /// The last arguments of `loop.changed`.
    pub(super) changed: RefCell<Option<List>>,
    pub(super) _charge: Charge,
}

impl LoopState {
    pub fn bytes() -> usize {
        size_of::<Self>() + OBJECT_BYTES
    }
}

impl Macro {
    pub fn bytes() -> usize {
        size_of::<Self>() + OBJECT_BYTES
    }
}
