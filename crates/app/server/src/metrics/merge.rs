//! Merges the texts of several registries into one: a metric may occur in a text once only, with the samples of all models.

/// The last line of a text.
const END: &str = "# EOF\n";

/// One text with all samples. Metrics are in the order in which they first occur.
pub fn merge(texts: &[String]) -> String {
    let mut families: Vec<Family<'_>> = Vec::new();
    for text in texts {
        let mut current = None;
        for line in text.lines().filter(|line| !line.is_empty() && *line != END.trim_end()) {
            let Some(name) = described(line) else {
                // Samples follow the description of their metric.
                current.iter().for_each(|&index: &usize| families[index].samples.push(line));
                continue;
            };
            let index = families.iter().position(|family| family.name == name).unwrap_or_else(|| {
                families.push(Family { name, description: Vec::new(), samples: Vec::new() });
                families.len() - 1
            });
            let description = &mut families[index].description;
            if !description.contains(&line) {
                description.push(line);
            }
            current = Some(index);
        }
    }
    let lines = families.iter().flat_map(|family| family.description.iter().chain(&family.samples));
    let mut text: String = lines.flat_map(|line| [line, "\n"]).collect();
    text.push_str(END);
    text
}

struct Family<'a> {
    name: &'a str,
    /// `# HELP`, `# TYPE` and `# UNIT`.
    description: Vec<&'a str>,
    samples: Vec<&'a str>,
}

/// The metric that a line describes.
fn described(line: &str) -> Option<&str> {
    line.strip_prefix("# ")?.split(' ').nth(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_of_two_models_is_described_once() {
        let of = |model: &str, value: u32| {
            format!(
                "# HELP steps Steps.\n# TYPE steps counter\nsteps_total{{model=\"{model}\"}} {value}\n\
                 # HELP pages Pages.\n# TYPE pages gauge\npages{{model=\"{model}\"}} 7\n# EOF\n"
            )
        };
        let server = "# HELP open Open.\n# TYPE open gauge\nopen 1\n# EOF\n".to_owned();
        assert_eq!(
            merge(&[server, of("a", 1), of("b", 2)]),
            "# HELP open Open.\n# TYPE open gauge\nopen 1\n\
             # HELP steps Steps.\n# TYPE steps counter\nsteps_total{model=\"a\"} 1\nsteps_total{model=\"b\"} 2\n\
             # HELP pages Pages.\n# TYPE pages gauge\npages{model=\"a\"} 7\npages{model=\"b\"} 7\n# EOF\n"
        );
        assert_eq!(merge(&[]), "# EOF\n");
    }
}
