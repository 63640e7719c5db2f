//! What a person sees while a run goes on: bars on a terminal, plain lines elsewhere. All on stderr.
//!
//! Every bar has a line of its own below what is printed; a log line goes above them all, so none is torn.

use std::io::{IsTerminal, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::telemetry::{note, say};

/// The bars of this process's terminal.
static BARS: LazyLock<MultiProgress> = LazyLock::new(|| {
    let bars = MultiProgress::new();
    let above = bars.clone();
    crate::telemetry::set_stderr_sink(Box::new(move |line| {
        above.suspend(|| {
            // Whoever closed stderr does not want the line.
            let _ = std::io::stderr().write_all(line);
        });
    }));
    bars
});

/// Progress of one phase of a run.
#[derive(Debug, Clone)]
pub struct Progress {
    shown: Option<(MultiProgress, ProgressBar)>,
    tenths: Option<Arc<Tenths>>,
}

/// A line for each tenth of a phase.
#[derive(Debug)]
struct Tenths {
    label: String,
    total: u64,
    done: AtomicU64,
}

impl Tenths {
    /// What is said once so many more are done. The end is for the phase itself to tell.
    fn line(&self, units: u64) -> Option<String> {
        let before = self.done.fetch_add(units, Ordering::Relaxed);
        let done = before + units;
        let tenth = |done: u64| done.saturating_mul(10) / self.total.max(1);
        let is_told = tenth(done) > tenth(before) && done < self.total;
        is_told.then(|| format!("{}: {done} of {}", self.label, self.total))
    }
}

impl Progress {
    /// A bar of `total` units labelled `label` if stderr is a terminal.
    #[must_use]
    pub fn start(label: &str, total: u64) -> Self {
        let shown = std::io::stderr().is_terminal().then(|| {
            let bar = bar_on(&BARS, label, total);
            bar.enable_steady_tick(Duration::from_millis(250));
            (BARS.clone(), bar)
        });
        Self { shown, tenths: None }
    }

    /// The same, with lines that begin with `about` where there is no terminal.
    #[must_use]
    pub fn with_lines(mut self, about: &str, total: u64) -> Self {
        if self.shown.is_none() {
            self.tenths = Some(Arc::new(Tenths { label: about.to_owned(), total, done: AtomicU64::new(0) }));
        }
        self
    }

    pub fn advance(&self, units: u64) {
        if let Some((_, bar)) = &self.shown {
            bar.inc(units);
        }
        if let Some(line) = self.tenths.as_ref().and_then(|tenths| tenths.line(units)) {
            say(&line);
        }
    }

    pub fn set_position(&self, position: u64) {
        if let Some((_, bar)) = &self.shown {
            bar.set_position(position);
        }
    }

    /// Prints a line above the bars, and to the log file.
    pub fn line(&self, text: &str) {
        note(text);
        match &self.shown {
            Some((bars, _)) => bars.suspend(|| say(text)),
            None => say(text),
        }
    }

    pub fn finish(&self) {
        if let Some((_, bar)) = &self.shown {
            bar.finish_and_clear();
        }
    }
}

fn bar_on(bars: &MultiProgress, label: &str, total: u64) -> ProgressBar {
    let bar = bars.add(ProgressBar::new(total));
    let template = "{prefix:>12} [{bar:30}] {pos}/{len} {elapsed_precise}<{eta_precise}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_prefix(label.to_owned());
    bar
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use indicatif::{ProgressDrawTarget, TermLike};

    use super::*;

    const WIDTH: usize = 100;

    /// A terminal of which one sees what stands on it.
    #[derive(Debug, Clone, Default)]
    struct Screen(Arc<Mutex<Cells>>);

    #[derive(Debug, Default)]
    struct Cells {
        lines: Vec<Vec<char>>,
        row: usize,
        column: usize,
    }

    impl Screen {
        fn lines(&self) -> Vec<String> {
            let lines = &self.0.lock().expect("screen").lines;
            let lines = lines.iter().map(|line| line.iter().collect::<String>().trim_end().to_owned());
            lines.filter(|line| !line.is_empty()).collect()
        }

        fn put(&self, text: &str) {
            let cells = &mut *self.0.lock().expect("screen");
            for character in text.chars() {
                // A full line ends when more comes.
                if character == '\n' || cells.column == WIDTH {
                    (cells.row, cells.column) = (cells.row + 1, 0);
                }
                if character == '\n' {
                    continue;
                }
                let (row, column) = (cells.row, cells.column);
                cells.lines.resize_with(cells.lines.len().max(row + 1), Vec::new);
                let line = &mut cells.lines[row];
                line.resize(line.len().max(column + 1), ' ');
                line[column] = character;
                cells.column += 1;
            }
        }

        fn go(&self, change: impl FnOnce(&mut Cells)) -> std::io::Result<()> {
            change(&mut self.0.lock().expect("screen"));
            Ok(())
        }
    }

    impl TermLike for Screen {
        fn width(&self) -> u16 {
            WIDTH as u16
        }

        fn move_cursor_up(&self, n: usize) -> std::io::Result<()> {
            self.go(|cells| cells.row = cells.row.saturating_sub(n))
        }

        fn move_cursor_down(&self, n: usize) -> std::io::Result<()> {
            self.go(|cells| cells.row += n)
        }

        fn move_cursor_right(&self, n: usize) -> std::io::Result<()> {
            self.go(|cells| cells.column = (cells.column + n).min(WIDTH))
        }

        fn move_cursor_left(&self, n: usize) -> std::io::Result<()> {
            self.go(|cells| cells.column = cells.column.saturating_sub(n))
        }

        fn write_line(&self, text: &str) -> std::io::Result<()> {
            self.put(text);
            self.put("\n");
            Ok(())
        }

        fn write_str(&self, text: &str) -> std::io::Result<()> {
            self.put(text);
            Ok(())
        }

        fn clear_line(&self) -> std::io::Result<()> {
            self.go(|cells| {
                cells.column = 0;
                if let Some(line) = cells.lines.get_mut(cells.row) {
                    line.clear();
                }
            })
        }

        fn flush(&self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn each_tenth_is_a_line_and_the_end_is_none() {
        let lines = |total: u64| {
            let tenths = Tenths { label: "evaluation".to_owned(), total, done: AtomicU64::new(0) };
            (0..total).filter_map(|_| tenths.line(1)).collect::<Vec<_>>()
        };
        assert_eq!(lines(3), ["evaluation: 1 of 3", "evaluation: 2 of 3"]);
        let thousand = lines(1000);
        assert_eq!(thousand.len(), 9);
        assert_eq!(
            (thousand[0].as_str(), thousand[8].as_str()),
            ("evaluation: 100 of 1000", "evaluation: 900 of 1000")
        );
        assert_eq!(lines(1), Vec::<String>::new());
    }

    #[test]
    fn two_bars_have_a_line_each_and_a_log_line_stands_above_them() {
        let screen = Screen::default();
        let target = ProgressDrawTarget::term_like(Box::new(screen.clone()));
        let bars = MultiProgress::with_draw_target(target);
        let (steps, trials) = (bar_on(&bars, "training", 4), bar_on(&bars, "trials", 8));
        steps.tick();
        trials.tick();
        let lines = screen.lines();
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].contains("training") && lines[1].contains("trials"), "{lines:?}");
        bars.suspend(|| screen.put("a line of the log\n"));
        let lines = screen.lines();
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert_eq!(lines[0], "a line of the log");
        assert!(lines[1].contains("training") && lines[2].contains("trials"), "{lines:?}");
        trials.finish_and_clear();
        let lines = screen.lines();
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[1].contains("training"), "{lines:?}");
    }
}
