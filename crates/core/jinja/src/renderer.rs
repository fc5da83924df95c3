//! Runs the statements of a template. Expressions are in `evaluate`.

use super::arguments::Arguments;
use super::ast::{Block, Expr, ForLoop, MacroDefinition, NamedCall, Stmt, StmtKind, Target};
use super::containers::{DictBuilder, List, ListBuilder, Text, TextBuilder};
use super::error::Error;
use super::meter::Meter;
use super::namespace::Namespaces;
use super::operators::items;
use super::print::write_str;
use super::scope::Scope;
use super::value::{LoopState, Macro, Value};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

/// How deep statements, expressions and calls may be nested while they run. Running recurses.
const RECURSION_MAX: usize = 250;

/// The state of one rendering.
pub(super) struct Renderer {
    meter: Rc<Meter>,
    pub scope: Rc<Scope>,
    /// What is being written: the output, and texts that are captured.
    outputs: Vec<TextBuilder>,
    depth: usize,
    pub namespaces: Namespaces,
    pub now: SystemTime,
}

/// What comes after a statement.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    Next,
    Break,
    Continue,
}

impl Renderer {
    pub fn new(meter: &Rc<Meter>, scope: Rc<Scope>, now: SystemTime) -> Result<Self, Error> {
        let outputs = vec![TextBuilder::new(meter)?];
        let namespaces = Namespaces::new(meter)?;
        Ok(Self { meter: Rc::clone(meter), scope, outputs, depth: 0, namespaces, now })
    }

    pub fn meter(&self) -> &Rc<Meter> {
        &self.meter
    }

    /// Runs the template and returns its output.
    pub fn run(mut self, block: &[Stmt]) -> Result<String, Error> {
        self.block(block)?;
        Ok(self.outputs.pop().map(TextBuilder::into_string).unwrap_or_default())
    }

    /// Runs something one level deeper.
    pub fn nested<T>(&mut self, run: impl FnOnce(&mut Self) -> Result<T, Error>) -> Result<T, Error> {
        if self.depth == RECURSION_MAX {
            return Err(Error::limit(format!("it is nested deeper than {RECURSION_MAX} while it runs")));
        }
        self.depth += 1;
        let result = run(self);
        self.depth -= 1;
        result
    }

    /// Runs something in a scope of its own, within `parent`.
    fn scoped<T>(&mut self, parent: Rc<Scope>, run: impl FnOnce(&mut Self) -> Result<T, Error>) -> Result<T, Error> {
        let scope = Scope::new(&self.meter, Some(parent))?;
        let outer = std::mem::replace(&mut self.scope, scope);
        let result = run(self);
        self.scope = outer;
        result
    }

    /// The text that something writes.
    fn captured(&mut self, run: impl FnOnce(&mut Self) -> Result<Flow, Error>) -> Result<Value, Error> {
        self.outputs.push(TextBuilder::new(&self.meter)?);
        let result = run(self);
        let captured = self.outputs.pop();
        result?;
        captured.map(TextBuilder::finish).ok_or_else(|| Error::failed("there is no output"))
    }

    fn output(&mut self) -> Result<&mut TextBuilder, Error> {
        self.outputs.last_mut().ok_or_else(|| Error::failed("there is no output"))
    }

    fn block(&mut self, block: &[Stmt]) -> Result<Flow, Error> {
        for statement in block {
            self.meter.steps(1)?;
            let flow = self.nested(|renderer| renderer.statement(&statement.kind));
            match flow.map_err(|error| error.at(statement.line))? {
                Flow::Next => {}
                flow => return Ok(flow),
            }
        }
        Ok(Flow::Next)
    }

    fn statement(&mut self, statement: &StmtKind) -> Result<Flow, Error> {
        match statement {
            StmtKind::Data(text) => self.output()?.push_str(text)?,
            StmtKind::Emit(value) => {
                let value = self.evaluate(value)?;
                write_str(self.output()?, &value)?;
            }
            StmtKind::If { arms, otherwise } => return self.conditional(arms, otherwise),
            StmtKind::For(for_loop) => {
                let value = self.evaluate(&for_loop.iterable)?;
                return self.for_loop(for_loop, &value, 0);
            }
            StmtKind::Set { target, value } => {
                let value = self.evaluate(value)?;
                self.assign(target, value)?;
            }
            StmtKind::SetBlock { target, filters, body } => {
                let value = self.filtered(filters, body)?;
                self.assign(target, value)?;
            }
            StmtKind::With { bindings, body } => return self.with(bindings, body),
            StmtKind::Macro(definition) => {
                let value = self.define(definition)?;
                self.scope.set(&definition.name, value)?;
            }
            StmtKind::Call { call, caller } => {
                let caller = self.define(caller)?;
                let value = self.evaluate_with_caller(call, caller)?;
                write_str(self.output()?, &value)?;
            }
            StmtKind::Filter { filters, body } => {
                let value = self.filtered(filters, body)?;
                write_str(self.output()?, &value)?;
            }
            StmtKind::Body(body) => return self.block(body),
            StmtKind::Do(value) => {
                self.evaluate(value)?;
            }
            StmtKind::Break => return Ok(Flow::Break),
            StmtKind::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::Next)
    }

    fn conditional(&mut self, arms: &[(Expr, Block)], otherwise: &[Stmt]) -> Result<Flow, Error> {
        for (condition, body) in arms {
            if self.evaluate(condition)?.is_true() {
                return self.block(body);
            }
        }
        self.block(otherwise)
    }

    fn with(&mut self, bindings: &[(Target, Expr)], body: &[Stmt]) -> Result<Flow, Error> {
        // No value sees the variables beside it.
        let _charge = self.meter.charge(size_of::<Value>() * bindings.len())?;
        let values: Result<Vec<Value>, Error> = bindings.iter().map(|(_, value)| self.evaluate(value)).collect();
        let (values, outer) = (values?, Rc::clone(&self.scope));
        self.scoped(outer, |renderer| {
            bindings.iter().zip(values).try_for_each(|((target, _), value)| renderer.assign(target, value))?;
            renderer.block(body)
        })
    }

    /// The text of a body, filtered.
    fn filtered(&mut self, filters: &[NamedCall], body: &[Stmt]) -> Result<Value, Error> {
        let outer = Rc::clone(&self.scope);
        let mut value = self.captured(|renderer| renderer.scoped(outer, |renderer| renderer.block(body)))?;
        for filter in filters {
            let arguments = self.arguments(&filter.arguments)?;
            value = self.filter(&filter.name, value, arguments)?;
        }
        Ok(value)
    }

    fn define(&mut self, definition: &Arc<MacroDefinition>) -> Result<Value, Error> {
        let charge = self.meter.charge(Macro::bytes())?;
        let (definition, scope) = (Arc::clone(definition), Rc::downgrade(&self.scope));
        Ok(Value::Macro(Rc::new(Macro { definition, scope, _charge: charge })))
    }

    fn assign(&mut self, target: &Target, value: Value) -> Result<(), Error> {
        self.meter.steps(1)?;
        match target {
            Target::Name(name) => self.scope.set(name, value),
            Target::Attribute { namespace, name } => match self.scope.get(namespace) {
                Some(Value::Namespace(namespace)) => namespace.set(Text::literal(name), value),
                _ => Err(Error::failed(format!("{namespace:?} is no namespace"))),
            },
            Target::Tuple(targets) => {
                let values = items(&self.meter, &value)?;
                if values.len() != targets.len() {
                    let (want, got) = (targets.len(), values.len());
                    return Err(Error::failed(format!("{want} values are assigned, but there are {got}")));
                }
                targets.iter().zip(values.iter()).try_for_each(|(target, value)| self.assign(target, value.clone()))
            }
        }
    }

    fn for_loop(&mut self, for_loop: &Arc<ForLoop>, value: &Value, depth: usize) -> Result<Flow, Error> {
        let items = self.loop_items(for_loop, value)?;
        if items.is_empty() {
            return self.block(&for_loop.otherwise);
        }
        let state = Rc::new(LoopState {
            items,
            index: Cell::new(0),
            depth,
            recursive: for_loop.recursive.then(|| Arc::clone(for_loop)),
            changed: RefCell::default(),
            _charge: self.meter.charge(LoopState::bytes())?,
        });
        let (outer, name) = (Rc::clone(&self.scope), Arc::from("loop"));
        for (index, item) in state.items.iter().enumerate() {
            self.meter.steps(1)?;
            state.index.set(index);
            let flow = self.scoped(Rc::clone(&outer), |renderer| {
                renderer.scope.set(&name, Value::Loop(Rc::clone(&state)))?;
                renderer.assign(&for_loop.target, item.clone())?;
                renderer.block(&for_loop.body)
            })?;
            if flow == Flow::Break {
                break;
            }
        }
        Ok(Flow::Next)
    }

    /// The items that a loop visits.
    fn loop_items(&mut self, for_loop: &ForLoop, value: &Value) -> Result<List, Error> {
        let all = items(&self.meter, value)?;
        let Some(condition) = &for_loop.condition else { return Ok(all) };
        let mut wanted = ListBuilder::new(&self.meter)?;
        let outer = Rc::clone(&self.scope);
        for item in all.iter() {
            let wants = self.scoped(Rc::clone(&outer), |renderer| {
                renderer.assign(&for_loop.target, item.clone())?;
                Ok(renderer.evaluate(condition)?.is_true())
            })?;
            if wants {
                wanted.push(item.clone())?;
            }
        }
        items(&self.meter, &wanted.finish())
    }

    /// `loop(value)` within a recursive loop.
    pub(super) fn recurse(&mut self, state: &LoopState, value: &Value) -> Result<Value, Error> {
        let for_loop = state.recursive.clone().ok_or_else(|| Error::failed("the loop is not recursive"))?;
        let depth = state.depth + 1;
        self.captured(|renderer| renderer.nested(|renderer| renderer.for_loop(&for_loop, value, depth)))
    }

    /// The text of a macro.
    pub(super) fn call_macro(
        &mut self,
        called: &Macro,
        arguments: Arguments,
        caller: Option<Value>,
    ) -> Result<Value, Error> {
        let definition = Arc::clone(&called.definition);
        let parent = called.scope.upgrade().ok_or_else(|| Error::failed("the scope of the macro has ended"))?;
        self.nested(|renderer| {
            renderer.captured(|renderer| {
                renderer.scoped(parent, |renderer| {
                    renderer.bind(&definition, arguments, caller)?;
                    renderer.block(&definition.body)
                })
            })
        })
    }

    /// Sets the parameters of a macro.
    fn bind(&mut self, definition: &MacroDefinition, arguments: Arguments, caller: Option<Value>) -> Result<(), Error> {
        let mut further = ListBuilder::new(&self.meter)?;
        let mut named = DictBuilder::new(&self.meter)?;
        // Names are compared one by one.
        self.meter.steps(definition.parameters.len().saturating_mul(1 + arguments.keywords.len()))?;
        for (index, (name, default)) in definition.parameters.iter().enumerate() {
            let given = match arguments.positional.get(index) {
                Some(value) => Some(value),
                None => arguments.keyword(name)?,
            };
            let value = match (given, default) {
                (Some(value), _) => value.clone(),
                (None, Some(default)) => self.evaluate(default)?,
                (None, None) => Value::undefined(name),
            };
            self.scope.set(name, value)?;
        }
        further.extend(arguments.positional.iter().skip(definition.parameters.len()).cloned())?;
        for (name, value) in &arguments.keywords {
            if !definition.parameters.iter().any(|(parameter, _)| **parameter == **name) {
                named.insert(Value::Str(name.clone()), value.clone())?;
            }
        }
        for (name, value) in [("varargs", further.finish_tuple()), ("kwargs", named.finish())] {
            self.scope.set(&Arc::from(name), value)?;
        }
        match caller {
            Some(caller) => self.scope.set(&Arc::from("caller"), caller),
            None => Ok(()),
        }
    }
}
