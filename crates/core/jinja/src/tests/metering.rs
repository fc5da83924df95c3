//! Work takes steps in proportion to the texts that it reads, and names are charged like other texts.

use super::*;
use crate::methods::TEXT_METHODS;

/// A text that takes many steps to read, and fits into memory a few times.
const BYTES: usize = 256 << 10;
const STEPS: u64 = (BYTES / 64) as u64;

/// The steps of evaluating an expression, in which `big` is a long text.
fn steps(expression: &str) -> u64 {
    let meter = Meter::new(Limits { steps_max: 100_000_000, bytes_max: 256 << 20, ..LIMITS });
    let big = json!({"big": "x".repeat(BYTES)});
    // Some of them are errors, which come after the work.
    let _ = render_metered(&meter, &format!("{{% set y = {expression} %}}"), big.as_object().unwrap());
    meter.steps_taken()
}

#[test]
fn reading_a_text_takes_steps_in_proportion_to_its_length() {
    let by_method = TEXT_METHODS.split(' ').map(|method| format!("big.{method}('y')"));
    let needles = "count endswith find index join partition removeprefix removesuffix rfind rindex rpartition rsplit \
        rstrip split startswith strip";
    let by_needle = needles.split(' ').map(|method| format!("'y'.{method}(big)"));
    let filters = "capitalize center e escape float forceescape format indent int length list lower pprint \
        replace('y','') reverse split('y') split split(none,1) title tojson trim trim('y') truncate upper wordcount unique \
        map('upper') join('y') last sort";
    let by_filter = filters.split(' ').map(|filter| format!("big | {filter}"));
    let needles = "replace(big,'') replace('y',big) split(big) trim(big) join(big) indent(big,true) attr(big)";
    let by_filter_needle = needles.split(' ').map(|filter| format!("'yy' | {filter}"));
    let others = "'y'.replace(big, ''); 'y'.replace('y', big); big.split(none, 1); big.rsplit(none, 1); big.find('y', 1); big in 'y'; \
        'y' in big; big == big + ''; big < big + ''; big ~ ''; '%s' % big; big % (); '{}'.format(big); big[-1]; big[::2]; \
        big[1:]; {big: 1}; {'y': 1}[big]; big in {'y': 1}; {}.get(big); namespace({big: 1}); namespace(**{big: 1}); \
        dict(**{big: 1}); namespace()[big]; big in namespace(); big is lower; 'y' is startingwith(big); [big] | sort; \
        big is eq(big + '')";
    let expressions = by_method.chain(by_needle).chain(by_filter).chain(by_filter_needle);
    let expressions = expressions.chain(others.split("; ").map(str::to_owned));
    let cheap: Vec<String> = expressions.filter(|expression| steps(expression) < STEPS).collect();
    assert!(cheap.is_empty(), "{cheap:?}");
}

#[test]
fn arguments_and_assignments_take_steps_for_each_of_them() {
    let numbers: Vec<String> = (0..1_000).map(|n| format!("n{n}")).collect();
    let numbers = numbers.join(", ");
    let count = |source: &str| {
        let meter = Meter::new(LIMITS);
        render_metered(&meter, source, &Map::new()).unwrap();
        meter.steps_taken()
    };
    let assigned = |times: usize| {
        count(&format!(
            "{{% set l = range(1000) %}}{{% for i in range({times}) %}}{{% set {numbers} = l %}}{{% endfor %}}"
        ))
    };
    assert!(assigned(11) - assigned(1) >= 10_000);
    let called = |times: usize| {
        let macros = format!("{{% macro m({numbers}) %}}{{% endmacro %}}");
        count(&format!("{macros}{{% for i in range({times}) %}}{{{{ m() }}}}{{% endfor %}}"))
    };
    assert!(called(11) - called(1) >= 10_000);
    let passed = |times: usize| {
        count(&format!(
            "{{% set l = range(1000) %}}{{% for i in range({times}) %}}{{% set d = cycler(*l) %}}{{% endfor %}}"
        ))
    };
    assert!(passed(11) - passed(1) >= 10_000);
    let names: String = (0..1_000).map(|n| format!("'k{n}': 1, ")).collect();
    let found =
        |times: usize| count(&format!("{{% set d = {{{names}}} %}}{{{{ ('{{k999}}' * {times}).format(**d) }}}}"));
    assert!(found(11) - found(1) >= 10_000);
}

#[test]
fn names_of_any_length_share_their_text() {
    let source = |last: &str| format!("{{% set k = 'x' * 1000000 %}}{{% set d = {{k: 1}} %}}{{% set ns = [] %}}{last}");
    for last in [
        "{% set a = namespace(d) %}",
        "{% set a = dict(**d) %}",
        "{% set a = namespace(**d) %}",
        "{% set a = d['y' * 1000000] %}",
    ] {
        let twice = source(&(0..8).map(|n| last.replace("set a", &format!("set a{n}"))).collect::<String>());
        let limits = Limits { steps_max: 10_000_000, bytes_max: 3 << 20, ..LIMITS };
        let text = render_with(limits, &twice, &Map::new());
        match last.contains("'y'") {
            // Each of these texts is charged as long as its undefined value lives.
            true => assert_eq!(text.unwrap_err().kind, ErrorKind::Limit),
            false => assert_eq!(text.unwrap(), "", "{last}"),
        }
    }
}

#[test]
fn long_names_are_refused_and_long_texts_are_cut_in_errors() {
    let name = "n".repeat(257);
    assert_eq!(kind_of(&format!("{{{{ {name} }}}}")), ErrorKind::Syntax);
    assert_eq!(render(&format!("{{{{ {} }}}}", &name[1..])).unwrap(), "");
    for expression in [
        "[1] | map(big) | list",
        "[1] | select(big) | list",
        "dict(**{big: 1}).x.y",
        "{}[big] + 1",
        "'a'.split(**{big: 1})",
        "('{' ~ big ~ '}').format(1)",
        "('{:' ~ big ~ '}').format(1)",
    ] {
        let source = format!("{{% set big = 'n' * 100000 %}}{{{{ {expression} }}}}");
        let error = render(&source).unwrap_err();
        assert!(error.to_string().len() < 150, "{expression}: {error}");
    }
}
