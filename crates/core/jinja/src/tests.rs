use super::*;
use serde_json::{Map, Value as Json, json};
use std::rc::Rc;
use std::time::{Duration, SystemTime};

mod metering;

const LIMITS: Limits = Limits { steps_max: 300_000, bytes_max: 2 << 20, time_max: Duration::from_secs(600) };

fn render_with(limits: Limits, source: &str, variables: &Map<String, Json>) -> Result<String, Error> {
    render_metered(&Meter::new(limits), source, variables)
}

fn render_metered(meter: &Rc<Meter>, source: &str, values: &Map<String, Json>) -> Result<String, Error> {
    let variables = Variables::new(meter)?;
    values.iter().try_for_each(|(name, value)| variables.set(name, value.clone()))?;
    Template::parse(source)?.render(variables, SystemTime::UNIX_EPOCH)
}

fn render(source: &str) -> Result<String, Error> {
    let variables = json!({"items": [3, 1, 2], "name": "Ada", "deep": {"a": {"b": [1, {"c": "d"}]}}});
    render_with(LIMITS, source, variables.as_object().unwrap())
}

/// Each case was rendered by Jinja2 in the environment of Hugging Face's transformers.
#[test]
fn templates_render_as_with_jinja2() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/jinja.json");
    let cases: Vec<Json> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut wrong = Vec::new();
    for case in &cases {
        let got = render_with(LIMITS, case["source"].as_str().unwrap(), case["variables"].as_object().unwrap());
        match (&got, case["text"].as_str()) {
            (Ok(text), Some(want)) if text == want => {}
            (Err(_), None) => {}
            _ => wrong.push(format!("{}\n  want {}\n  got  {got:?}", case["source"], case["text"])),
        }
    }
    assert!(!cases.is_empty() && wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

fn kind_of(source: &str) -> ErrorKind {
    match render(source) {
        Ok(text) => panic!("{source}: {} bytes", text.len()),
        Err(error) => {
            assert!(!error.to_string().contains('\n') && error.to_string().len() < 600, "{error}");
            error.kind
        }
    }
}

/// A template that applies `step` to `ns.x` many times, and then evaluates `last`.
fn repeated(start: &str, step: &str, last: &str) -> String {
    format!(
        "{{% set ns = namespace(x={start}) %}}{{% for i in range(120) %}}{{% set ns.x = {step} %}}{{% endfor %}}{{{{ {last} }}}}"
    )
}

#[test]
fn texts_and_lists_that_grow_are_refused() {
    let doubled = ["ns.x ~ ns.x", "ns.x + ns.x", "ns.x * 2", "ns.x | replace('a', ns.x)", "ns.x.replace('a', ns.x)"];
    let joined =
        ["[ns.x, ns.x] | join(ns.x)", "ns.x.join([ns.x, ns.x])", "ns.x | indent(ns.x)", "'%s%s' % (ns.x, ns.x)"];
    let formatted = ["'{0}{0}'.format(ns.x)", "ns.x | tojson | tojson", "ns.x | e ~ '&' * (ns.x | length)"];
    for step in doubled.iter().chain(&joined).chain(&formatted) {
        assert_eq!(kind_of(&repeated("'a\\na\\n'", step, "1")), ErrorKind::Limit, "{step}");
    }
    for step in ["ns.x + ns.x", "ns.x * 2", "ns.x | batch(1, 0) | list + ns.x + ns.x"] {
        assert_eq!(kind_of(&repeated("[1]", step, "1")), ErrorKind::Limit, "{step}");
    }
    for huge in [
        "'x' * 10 ** 12",
        "[1] * 10 ** 12",
        "(1, 2) * 10 ** 12",
        "range(10 ** 12)",
        "'x' | center(10 ** 12)",
        "'x'.ljust(10 ** 12)",
        "'1'.zfill(10 ** 12)",
        "'%999999999999d' % 1",
        "'{:>999999999999}'.format(1)",
        "'a\\nb' | indent(10 ** 12)",
        "[1] | batch(10 ** 12, 0)",
        "[1] | slice(10 ** 12)",
        "('x,' * 10 ** 6).split(',')",
        "('x ' * 10 ** 6).split(none, 10 ** 9)",
        "('x' * 10 ** 6) | list",
        "('x' * 10 ** 6)[::-1]",
    ] {
        assert_eq!(kind_of(&format!("{{{{ {huge} }}}}")), ErrorKind::Limit, "{huge}");
    }
    let capture = "{% set x %}{% for i in range(100000) %}#{% endfor %}{% endset %}".replace('#', &"x".repeat(1000));
    assert_eq!(kind_of(&capture), ErrorKind::Limit);
    let output = "{% for i in range(100000) %}#{% endfor %}".replace('#', &"x".repeat(1000));
    assert_eq!(kind_of(&output), ErrorKind::Limit);
}

#[test]
fn namespaces_may_hold_themselves_and_end_with_the_rendering() {
    let itself = "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns.x.x }}";
    let within = "{% set ns = namespace() %}{% set ns.x = [{'a': ns, 'b': ns.get}] %}{{ ns.x }}";
    let chain = "{% set ns = namespace() %}{% for i in range(9000) %}{% set ns.x = namespace(x=ns.x) %}{% endfor %}\
        {% set ns.x = cycler(ns) %}";
    for source in [itself, within, chain, "{% set ns = namespace() %}{% set ns.x = ns %}{{ raise_exception(1) }}"] {
        let meter = Meter::new(Limits { bytes_max: 16 << 20, ..LIMITS });
        let text = render_metered(&meter, source, &Map::new());
        assert_eq!(text.is_err(), source.contains("raise"), "{source}: {text:?}");
        assert_eq!(meter.bytes_taken(), 0, "{source}");
    }
}

#[test]
fn every_method_is_known_by_its_name() {
    let known = |receiver: &str, names: &str| {
        for name in names.split(' ') {
            let defined = format!("{{{{ {receiver}.{name} is callable and {receiver}['{name}'] is defined }}}}");
            assert_eq!(render(&defined).unwrap(), "True", "{name}");
            let called = render(&format!("{{{{ {receiver}.{name}(*items) }}}}"));
            assert!(!called.is_err_and(|error| error.to_string().contains("no method")), "{name}");
        }
    };
    known("name", methods::TEXT_METHODS);
    known("items", &methods::LIST_METHODS.join(" "));
    known("deep", &methods::DICT_METHODS.join(" "));
}

#[test]
fn loops_and_what_is_nested_without_bound_are_no_values_of_others() {
    let a_loop = "{% set ns = namespace() %}{% for i in [1] %}{% set ns.x = loop %}{% endfor %}";
    assert_eq!(kind_of(a_loop), ErrorKind::Failed);
    for step in ["[ns.x]", "{'a': ns.x}", "(ns.x,)", "[[[ns.x]]]", "[[ns.x].copy]", "cycler([ns.x])", "cycler(ns.x)"] {
        assert_eq!(kind_of(&repeated("1", step, "1").replace("120", "100000")), ErrorKind::Limit, "{step}");
    }
}

/// The values are small, but walking them takes `2 ^ 120` steps.
#[test]
fn walking_a_value_that_shares_its_parts_ends() {
    let lasts =
        ["ns.x | tojson", "ns.x | string", "ns.x == ns.y", "ns.y in [ns.x]", "[ns.x, ns.y] | sort", "'%s' % [ns.x]"];
    for last in lasts.iter().chain(&["[ns.x, ns.y] | unique | list", "ns.x < ns.y", "ns.x | join", "ns.x ~ ''"]) {
        let source =
            repeated("1", "[ns.x, ns.x]", last).replace("{% endfor %}", "{% set ns.y = [ns.x, ns.x] %}{% endfor %}");
        let source =
            source.replace("[ns.x, ns.x] %}{% set ns.y = [ns.x, ns.x]", "[ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y]");
        assert_eq!(kind_of(&source.replace("(x=1)", "(x=1, y=1)")), ErrorKind::Limit, "{last}");
    }
    let dicts = repeated("{}", "{'a': ns.x, 'b': ns.x}", "ns.x | dictsort | string");
    assert_eq!(kind_of(&dicts), ErrorKind::Limit);
    // These do not walk it.
    assert_eq!(render(&repeated("1", "[ns.x, ns.x]", "ns.x | length")).unwrap(), "2");
    assert_eq!(render(&repeated("{}", "{'a': ns.x}", "ns.x | dictsort | length")).unwrap(), "1");
}

#[test]
fn what_never_ends_is_given_up() {
    let endless = "{% for i in range(5000) %}{% for j in range(5000) %}{% endfor %}{% endfor %}";
    let recursion = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    let both = "{% macro m(n) %}{% for i in range(9) %}{{ m(n + 1) }}{% endfor %}{% endmacro %}{{ m(0) }}";
    let callers = "{% macro m() %}{% call m() %}{% endcall %}{% endmacro %}{{ m() }}";
    let loops = "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}";
    let macros = "{% for i in range(10000) %}{% for j in range(100) %}{% macro m() %}{{ i }}{% endmacro %}{% endfor %}{% endfor %}";
    let scans = "{% set x = 'a' * 500000 %}{% for i in range(5000) %}{% if 'b' in x %}{% endif %}{% endfor %}";
    for source in [endless, recursion, both, callers, loops, macros, scans] {
        assert_eq!(kind_of(source), ErrorKind::Limit, "{source}");
    }
    let now = Limits { time_max: Duration::ZERO, ..LIMITS };
    assert_eq!(render_with(now, endless, &Map::new()).unwrap_err().kind, ErrorKind::Limit);
}

#[test]
fn sources_that_are_nested_or_chained_without_bound_are_refused_or_run() {
    let nested =
        |open: &str, inner: &str, close: &str| format!("{}{inner}{}", open.repeat(20_000), close.repeat(20_000));
    for source in [
        format!("{{{{ {} }}}}", nested("(", "1", ")")),
        format!("{{{{ {} }}}}", nested("[", "", "]")),
        format!("{{{{ {} }}}}", nested("{1: ", "1", "}")),
        format!("{{{{ {} }}}}", nested("not ", "1", "")),
        format!("{{{{ {} }}}}", nested("- ", "1", "")),
        format!("{{{{ {} }}}}", nested("f(", "1", ")")),
        format!("{{{{ {} }}}}", nested("1 if 1 else ", "1", "")),
        format!("{{{{ 1 {} }}}}", nested("if 1 ", "", "")),
        nested("{% if 1 %}", "", "{% endif %}"),
        nested("{% for x in y %}", "", "{% endfor %}"),
        nested("{% macro m() %}", "", ""),
        format!("{{% set {} = 1 %}}", nested("(", "a", ")")),
        format!("{{{{ {} }}}}", "1,".repeat(200_000)),
    ] {
        assert_eq!(kind_of(&source), ErrorKind::Syntax, "{}", &source[..20]);
    }
    let sum = format!("{{{{ 0{} }}}}", " + 1".repeat(20_000));
    assert_eq!(render(&sum).unwrap(), "20000");
    let filters = format!("{{{{ 'a'{} }}}}", " | upper | lower".repeat(10_000));
    assert_eq!(render(&filters).unwrap(), "a");
    let attributes = format!("{{{{ deep{} }}}}", ".a".repeat(100));
    assert_eq!(kind_of(&attributes), ErrorKind::Failed);
}

#[test]
fn errors_name_their_line_and_are_short() {
    let error = render("a\n\n{{ name.first.second }}").unwrap_err();
    assert_eq!(error.to_string(), "\"first\" is undefined (line 3)");
    let error = render("{% if name %}\n{{ name }\n{% endif %}").unwrap_err();
    assert_eq!((error.kind, error.line), (ErrorKind::Syntax, Some(2)));
    let error = render("{{ raise_exception('no ' * 10000) }}").unwrap_err();
    assert_eq!((error.kind, error.to_string().len()), (ErrorKind::Raised, 500));
    for source in [
        "{{",
        "{% if",
        "{#",
        "{% raw %}",
        "{% endif %}",
        "{% for x %}",
        "{{ 'a }}",
        "{{ 1 + }}",
        "{{ a b }}",
        "{{ ) }}",
        "{% include 'x' %}",
        "{{ 9999999999999999999999999999999999999999999 }}",
    ] {
        assert_eq!(kind_of(source), ErrorKind::Syntax, "{source}");
    }
}

#[test]
fn memory_is_given_back_when_a_value_is_dropped() {
    // Each round makes a text of 500 kB; together they would exceed the limit.
    let source = "{% set ns = namespace() %}{% for i in range(20) %}{% set ns.x = 'x' * 500000 %}{% endfor %}{{ ns.x | length }}";
    assert_eq!(render(source).unwrap(), "500000");
}

#[test]
fn the_last_of_two_values_for_one_key_counts_in_small_and_large_dicts() {
    for count in [3, 8, 9, 50] {
        let entries: String = (0..count).map(|n| format!("'k{n}': {n}, {n}: 'v', ")).collect();
        let source = format!(
            "{{% set d = {{ {entries} 'k1': 'x', 2.0: 'y' }} %}}{{{{ d.k1 }}}}{{{{ d[2] }}}}{{{{ d | length }}}}{{{{ d['k0'] }}}}{{{{ d.none }}}}"
        );
        assert_eq!(render(&source).unwrap(), format!("xy{}0", 2 * count));
    }
}

/// Pieces of expressions: any sequence of them is an error or a value, and never a panic.
const PIECES: &[&str] = &[
    "name",
    "items",
    "deep",
    "deep.a",
    "ns",
    "ns.x",
    "m",
    "loop",
    "1",
    "-1",
    "0",
    "2.5",
    "10 ** 30",
    "'a b'",
    "'é\\n%s{}'",
    "''",
    "none",
    "true",
    "[]",
    "{}",
    "[1, 'b']",
    "{'k': [1]}",
    "(1, 2)",
    "(",
    ")",
    "[",
    "]",
    ":",
    ",",
    ".",
    "|",
    "+",
    "-",
    "*",
    "/",
    "//",
    "%",
    "**",
    "~",
    "==",
    "<",
    "in",
    "not",
    "and",
    "or",
    "is",
    "if",
    "else",
    "[1:]",
    "[::-1]",
    "[-3:9:2]",
    ".x",
    ".split()",
    ".split('a', 1)",
    ".replace('a', 'bb')",
    ".format(1, k=2)",
    ".items()",
    ".get('k')",
    ".strip('a')",
    ".center(9)",
    ".zfill(3)",
    "(1)",
    "(name, k=1)",
    "(*items)",
    "| tojson(indent=2)",
    "| sort",
    "| dictsort",
    "| join('-')",
    "| map('upper')",
    "| map(attribute='k')",
    "| select('odd')",
    "| batch(2, 0)",
    "| slice(3)",
    "| groupby('a')",
    "| unique",
    "| indent(2)",
    "| round(1)",
    "| int",
    "| length",
    "| list",
    "| first",
    "| min",
    "| sum",
    "| format(1)",
    "| reverse",
    "is odd",
    "is divisibleby 3",
    "is mapping",
    "is in items",
    "'%5.1f' %",
    "'{:>5}{:x}'.format",
    "range(",
    "dict(a=",
    "namespace(",
    ".get",
    ".upper",
    ".find('a', 1)",
    "| truncate(3)",
    "cycler(1, 'b')",
    ".next()",
    "joiner('-')",
];

proptest::proptest! {
    #[test]
    fn any_sequence_of_pieces_ends_with_a_text_or_an_error(
        expressions in proptest::collection::vec(proptest::collection::vec(proptest::sample::select(PIECES), 1..7), 1..4),
    ) {
        let limits = Limits { steps_max: 20_000, bytes_max: 200_000, ..LIMITS };
        let variables = json!({"items": [3, 1, 2], "name": "Ada", "deep": {"a": {"b": [1, {"c": "d"}]}}});
        let mut source = "{% set ns = namespace(x=name) %}{% macro m(a, k=2) %}{{ a }}{{ caller() if caller }}{% endmacro %}".to_owned();
        for (index, pieces) in expressions.iter().enumerate() {
            let expression = pieces.join(" ");
            source += &match index {
                0 => format!("{{{{ {expression} }}}}"),
                1 => format!("{{% set ns.x = {expression} %}}{{{{ ns.x }}}}"),
                _ => format!("{{% for x in {expression} %}}{{{{ loop.index }}}}{{{{ x }}}}{{% endfor %}}"),
            };
        }
        let _ = render_with(limits, &source, variables.as_object().unwrap());
    }
}
