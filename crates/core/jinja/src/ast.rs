//! A parsed template.
//!
//! Chains (`a ~ b ~ c`, `a.b[c] | d`) are lists, not nested, so that only what the source nests is deep.

use std::sync::Arc;

pub(super) type Block = Vec<Stmt>;

#[derive(Debug)]
pub(super) struct Stmt {
    pub line: u32,
    pub kind: StmtKind,
}

#[derive(Debug)]
pub(super) enum StmtKind {
    Data(Arc<str>),
    Emit(Expr),
    If {
        arms: Vec<(Expr, Block)>,
        otherwise: Block,
    },
    For(Arc<ForLoop>),
    Set {
        target: Target,
        value: Expr,
    },
    SetBlock {
        target: Target,
        filters: Vec<NamedCall>,
        body: Block,
    },
    With {
        bindings: Vec<(Target, Expr)>,
        body: Block,
    },
    Macro(Arc<MacroDefinition>),
    Call {
        call: Expr,
        caller: Arc<MacroDefinition>,
    },
    Filter {
        filters: Vec<NamedCall>,
        body: Block,
    },
    /// A body that is rendered as it is: `{% generation %}`, `{% block %}`.
    Body(Block),
    Do(Expr),
    Break,
    Continue,
}

#[derive(Debug)]
pub(super) enum Target {
    Name(Arc<str>),
    /// An attribute of a namespace.
    Attribute {
        namespace: Arc<str>,
        name: Arc<str>,
    },
    Tuple(Vec<Target>),
}

#[derive(Debug)]
pub(super) struct ForLoop {
    pub target: Target,
    pub iterable: Expr,
    pub condition: Option<Expr>,
    pub recursive: bool,
    pub body: Block,
    pub otherwise: Block,
}

#[derive(Debug)]
pub(super) struct MacroDefinition {
    pub name: Arc<str>,
    pub parameters: Vec<Parameter>,
    pub body: Block,
}

/// A parameter of a macro: its name and its default.
pub(super) type Parameter = (Arc<str>, Option<Expr>);

#[derive(Debug)]
pub(super) enum Expr {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<str>),
    Name(Arc<str>),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Not(Box<Expr>),
    Negative(Box<Expr>),
    Positive(Box<Expr>),
    And(Vec<Expr>),
    Or(Vec<Expr>),
    Concat(Vec<Expr>),
    Compare { first: Box<Expr>, rest: Vec<(Comparison, Expr)> },
    Arithmetic { first: Box<Expr>, rest: Vec<(Operator, Expr)> },
    If { condition: Box<Expr>, then: Box<Expr>, otherwise: Option<Box<Expr>> },
    Postfix { base: Box<Expr>, steps: Vec<Step> },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    In,
    NotIn,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operator {
    Add,
    Subtract,
    Multiply,
    Divide,
    FloorDivide,
    Remainder,
    Power,
}

/// What follows an expression.
#[derive(Debug)]
pub(super) enum Step {
    Attribute(Arc<str>),
    Item(Expr),
    Slice(Box<[Option<Expr>; 3]>),
    Call(Vec<Argument>),
    Filter(NamedCall),
    Test { call: NamedCall, negated: bool },
}

#[derive(Debug)]
pub(super) struct NamedCall {
    pub name: Arc<str>,
    pub arguments: Vec<Argument>,
}

#[derive(Debug)]
pub(super) enum Argument {
    Positional(Expr),
    Keyword(Arc<str>, Expr),
    /// `*list`
    Positionals(Expr),
    /// `**dict`
    Keywords(Expr),
}
