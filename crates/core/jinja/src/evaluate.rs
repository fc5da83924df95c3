//! Evaluates expressions.

use super::arguments::Arguments;
use super::ast::{Argument, Comparison, Expr, Step};
use super::containers::{DictBuilder, ListBuilder, Text, TextBuilder};
use super::error::{Error, quoted};
use super::methods::{CHANGING_METHODS, dict_method, has_method, list_method, missing, text_method};
use super::objects::Method;
use super::operators::{arithmetic, compare, equals, item, items, slice, undefined};
use super::print::write_str;
use super::renderer::Renderer;
use super::value::{LoopState, Value};
use std::rc::Rc;

impl Renderer {
    pub(super) fn evaluate(&mut self, expression: &Expr) -> Result<Value, Error> {
        self.evaluate_with(expression, None)
    }

    /// Evaluates the call of `{% call %}`: the macro can call back.
    pub(super) fn evaluate_with_caller(&mut self, expression: &Expr, caller: Value) -> Result<Value, Error> {
        self.evaluate_with(expression, Some(caller))
    }

    fn evaluate_with(&mut self, expression: &Expr, caller: Option<Value>) -> Result<Value, Error> {
        self.meter().steps(1)?;
        match expression {
            Expr::None => Ok(Value::None),
            Expr::Bool(value) => Ok(Value::Bool(*value)),
            Expr::Int(value) => Ok(Value::Int(*value)),
            Expr::Float(value) => Ok(Value::Float(*value)),
            Expr::Str(text) => Ok(Value::literal(text)),
            Expr::Name(name) => Ok(self.scope.get(name).unwrap_or_else(|| Value::undefined(name))),
            _ => self.nested(|renderer| renderer.compound(expression, caller)),
        }
    }

    fn compound(&mut self, expression: &Expr, caller: Option<Value>) -> Result<Value, Error> {
        match expression {
            Expr::List(parts) => Ok(self.list(parts)?.finish()),
            Expr::Tuple(parts) => Ok(self.list(parts)?.finish_tuple()),
            Expr::Dict(entries) => self.dict(entries),
            Expr::Not(value) => Ok(Value::Bool(!self.evaluate(value)?.is_true())),
            Expr::Negative(value) => self.negative(value),
            Expr::Positive(value) => self.evaluate(value),
            Expr::And(parts) => self.first(parts, false),
            Expr::Or(parts) => self.first(parts, true),
            Expr::Concat(parts) => self.concat(parts),
            Expr::Compare { first, rest } => self.compare(first, rest),
            Expr::Arithmetic { first, rest } => {
                let mut value = self.evaluate(first)?;
                for (operator, operand) in rest {
                    let operand = self.evaluate(operand)?;
                    value = arithmetic(self.meter(), &value, *operator, &operand)?;
                }
                Ok(value)
            }
            Expr::If { condition, then, otherwise } => match (self.evaluate(condition)?.is_true(), otherwise) {
                (true, _) => self.evaluate(then),
                (false, Some(otherwise)) => self.evaluate(otherwise),
                (false, None) => Ok(Value::Undefined(None)),
            },
            Expr::Postfix { base, steps } => self.postfix(base, steps, caller),
            _ => self.evaluate(expression),
        }
    }

    fn list(&mut self, parts: &[Expr]) -> Result<ListBuilder, Error> {
        let mut list = ListBuilder::new(self.meter())?;
        for part in parts {
            list.push(self.evaluate(part)?)?;
        }
        Ok(list)
    }

    fn dict(&mut self, entries: &[(Expr, Expr)]) -> Result<Value, Error> {
        let mut dict = DictBuilder::new(self.meter())?;
        for (key, value) in entries {
            let key = self.evaluate(key)?;
            dict.insert(key, self.evaluate(value)?)?;
        }
        Ok(dict.finish())
    }

    fn negative(&mut self, value: &Expr) -> Result<Value, Error> {
        match self.evaluate(value)? {
            Value::Float(value) => Ok(Value::Float(-value)),
            value => {
                let negative = value.as_int().and_then(i128::checked_neg).map(Value::Int);
                negative.ok_or_else(|| Error::failed(format!("a {} has no negative", value.type_name())))
            }
        }
    }

    /// The first value that is as true as `wanted`, else the last.
    fn first(&mut self, parts: &[Expr], wanted: bool) -> Result<Value, Error> {
        let mut value = Value::Undefined(None);
        for part in parts {
            value = self.evaluate(part)?;
            if value.is_true() == wanted {
                break;
            }
        }
        Ok(value)
    }

    fn concat(&mut self, parts: &[Expr]) -> Result<Value, Error> {
        let mut text = TextBuilder::new(self.meter())?;
        for part in parts {
            let value = self.evaluate(part)?;
            write_str(&mut text, &value)?;
        }
        Ok(text.finish())
    }

    /// `a < b < c` compares neighbours.
    fn compare(&mut self, first: &Expr, rest: &[(Comparison, Expr)]) -> Result<Value, Error> {
        let mut left = self.evaluate(first)?;
        for (comparison, right) in rest {
            let right = self.evaluate(right)?;
            if !compare(self.meter(), &left, *comparison, &right)? {
                return Ok(Value::Bool(false));
            }
            left = right;
        }
        Ok(Value::Bool(true))
    }

    fn postfix(&mut self, base: &Expr, steps: &[Step], caller: Option<Value>) -> Result<Value, Error> {
        let mut value = self.evaluate(base)?;
        let mut steps = steps.iter();
        while let Some(step) = steps.next() {
            self.meter().steps(1)?;
            value = match step {
                Step::Attribute(name) => match steps.as_slice().first() {
                    Some(Step::Call(arguments)) => {
                        steps.next();
                        let arguments = self.arguments(arguments)?;
                        self.call_method(&value, &Text::literal(name), arguments)?
                    }
                    _ => self.attribute(&value, &Text::literal(name))?,
                },
                Step::Item(key) => {
                    let key = self.evaluate(key)?;
                    item(self.meter(), &value, &key)?
                }
                Step::Slice(bounds) => self.slice(&value, bounds)?,
                Step::Call(arguments) => {
                    let arguments = self.arguments(arguments)?;
                    let caller = caller.clone().filter(|_| steps.as_slice().is_empty());
                    self.call(&value, arguments, caller)?
                }
                Step::Filter(filter) => {
                    let arguments = self.arguments(&filter.arguments)?;
                    self.filter(&filter.name, value, arguments)?
                }
                Step::Test { call, negated } => {
                    let arguments = self.arguments(&call.arguments)?;
                    Value::Bool(self.test(&call.name, &value, &arguments)? != *negated)
                }
            };
        }
        Ok(value)
    }

    fn slice(&mut self, value: &Value, bounds: &[Option<Expr>; 3]) -> Result<Value, Error> {
        let mut values = [None, None, None];
        for (value, bound) in values.iter_mut().zip(bounds) {
            *value = bound.as_ref().map(|bound| self.evaluate(bound)).transpose()?;
        }
        slice(self.meter(), value, &values)
    }

    pub(super) fn arguments(&mut self, arguments: &[Argument]) -> Result<Arguments, Error> {
        let mut values = Arguments::new(self.meter())?;
        for argument in arguments {
            match argument {
                Argument::Positional(value) => values.push(self.evaluate(value)?)?,
                Argument::Keyword(name, value) => values.push_keyword(Text::literal(name), self.evaluate(value)?)?,
                Argument::Positionals(value) => {
                    let list = self.evaluate(value)?;
                    items(self.meter(), &list)?.iter().try_for_each(|value| values.push(value.clone()))?;
                }
                Argument::Keywords(value) => {
                    let Value::Dict(dict) = self.evaluate(value)? else {
                        return Err(Error::failed("named arguments come from a dict"));
                    };
                    for (key, value) in dict.entries() {
                        let Value::Str(name) = key else {
                            return Err(Error::failed("the name of an argument is a text"));
                        };
                        self.meter().read(name.len())?;
                        values.push_keyword(name.clone(), value.clone())?;
                    }
                }
            }
        }
        Ok(values)
    }

    fn attribute(&mut self, value: &Value, name: &Text) -> Result<Value, Error> {
        match value {
            Value::Undefined(missing) => Err(undefined(missing)),
            Value::Namespace(namespace) => {
                Ok(namespace.get(name)?.unwrap_or_else(|| Value::Undefined(Some(name.clone()))))
            }
            value if has_method(value, name) => Method::value(self.meter(), value, name.clone()),
            // Jinja's sandbox hides the methods that would change a dict, and the entries of these names with them.
            Value::Dict(_) if CHANGING_METHODS.contains(&&**name) => Ok(Value::Undefined(Some(name.clone()))),
            Value::Dict(dict) => {
                let found = dict.get(&Value::Str(name.clone())).cloned();
                Ok(found.unwrap_or_else(|| Value::Undefined(Some(name.clone()))))
            }
            Value::Cycler(cycler) if &**name == "current" => Ok(cycler.current()),
            Value::Loop(state) => Ok(state.attribute(name).unwrap_or_else(|| Value::Undefined(Some(name.clone())))),
            Value::Macro(called) if &**name == "name" => Ok(Value::literal(&called.definition.name)),
            _ => Ok(Value::Undefined(Some(name.clone()))),
        }
    }

    fn call_method(&mut self, value: &Value, name: &Text, arguments: Arguments) -> Result<Value, Error> {
        let meter = &Rc::clone(self.meter());
        let found = match value {
            Value::Str(text) => text_method(meter, text, name, &arguments)?,
            Value::Dict(dict) => dict_method(meter, dict, name, &arguments)?,
            Value::List(list) => list_method(meter, list, name, &arguments)?,
            Value::Cycler(cycler) => cycler.call(name),
            Value::Loop(state) if &**name == "cycle" => {
                let count = arguments.positional.len().max(1);
                arguments.positional.get(state.index.get() % count).cloned()
            }
            Value::Loop(state) if &**name == "changed" => Some(Value::Bool(self.changed(state, &arguments)?)),
            _ => None,
        };
        if let Some(found) = found {
            return Ok(found);
        }
        match self.attribute(value, name)? {
            Value::Undefined(_) | Value::Method(_) => {
                Err(Error::failed(format!("a {} has no method {}", value.type_name(), quoted(name))))
            }
            function => self.call(&function, arguments, None),
        }
    }

    fn changed(&mut self, state: &LoopState, arguments: &Arguments) -> Result<bool, Error> {
        let mut now = ListBuilder::new(self.meter())?;
        now.extend(arguments.positional.iter().cloned())?;
        let now = items(self.meter(), &now.finish())?;
        let before = state.changed.borrow().clone();
        let same = match before {
            Some(before) => equals(self.meter(), &Value::List(before), &Value::List(now.clone()))?,
            None => false,
        };
        state.changed.replace(Some(now));
        Ok(!same)
    }

    fn call(&mut self, value: &Value, arguments: Arguments, caller: Option<Value>) -> Result<Value, Error> {
        match value {
            Value::Macro(called) => self.call_macro(called, arguments, caller),
            Value::Loop(state) => {
                let [value] = arguments.bind(["iterable"])?;
                self.recurse(state, value.ok_or_else(|| missing("iterable"))?)
            }
            Value::Function(function) => self.call_function(*function, &arguments),
            Value::Method(method) => self.call_method(&method.receiver, &method.name, arguments),
            Value::Joiner(joiner) => joiner.next(self.meter()),
            Value::Undefined(name) => Err(undefined(name)),
            _ => Err(Error::failed(format!("a {} cannot be called", value.type_name()))),
        }
    }
}

impl LoopState {
    /// `loop.index` and the like.
    fn attribute(&self, name: &str) -> Option<Value> {
        let (index, length) = (self.index.get(), self.items.len());
        let integer = |value: usize| Some(Value::Int(value as i128));
        match name {
            "index" => integer(index + 1),
            "index0" => integer(index),
            "revindex" => integer(length - index),
            "revindex0" => integer(length - index - 1),
            "first" => Some(Value::Bool(index == 0)),
            "last" => Some(Value::Bool(index + 1 == length)),
            "length" => integer(length),
            "depth" => integer(self.depth + 1),
            "depth0" => integer(self.depth),
            "previtem" => index.checked_sub(1).and_then(|before| self.items.get(before)).cloned(),
            "nextitem" => self.items.get(index + 1).cloned(),
            _ => None,
        }
    }
}
