//! The rows of an answer, for people and as JSON.

use std::collections::HashSet;
use std::io::Write;

use anyhow::bail;

use crate::capture::sql::arrow::array::{Array, AsArray as _, RecordBatch};
use crate::capture::sql::arrow::datatypes::{DataType, Float32Type, Float64Type, Schema};
use crate::capture::sql::arrow::json::writer::{LineDelimited, WriterBuilder};
use crate::capture::sql::arrow::util::display::{ArrayFormatter, FormatOptions};
use crate::cli::Usage;
use crate::run::count;

/// What is done with rows.
pub(super) trait Rows {
    fn add(&mut self, out: &mut dyn Write, batch: &RecordBatch) -> anyhow::Result<()>;

    /// There are no more.
    fn end(&mut self, out: &mut dyn Write) -> anyhow::Result<()>;
}

/// An object a row. Times are RFC 3339, binary values hexadecimal.
pub(super) struct JsonRows;

impl JsonRows {
    /// # Errors
    /// Two columns have one name: an object would hold one of them.
    pub(super) fn new(schema: &Schema) -> anyhow::Result<Self> {
        let mut names = HashSet::new();
        match schema.fields().iter().find(|field| !names.insert(field.name())) {
            Some(twice) => {
                let problem = format!("two columns have the name {}: give one another by AS", twice.name());
                Err(Usage(problem).into())
            }
            None => Ok(Self),
        }
    }
}

impl Rows for JsonRows {
    fn add(&mut self, out: &mut dyn Write, batch: &RecordBatch) -> anyhow::Result<()> {
        for (field, column) in batch.schema().fields().iter().zip(batch.columns()) {
            if !is_finite(column) {
                let name = field.name();
                bail!(
                    "column {name} has a number that is infinite or none, which JSON cannot tell: cast it to VARCHAR"
                );
            }
        }
        let mut rows = WriterBuilder::new().with_explicit_nulls(true).build::<_, LineDelimited>(Vec::new());
        rows.write(batch)?;
        rows.finish()?;
        Ok(out.write_all(&rows.into_inner())?)
    }

    fn end(&mut self, _: &mut dyn Write) -> anyhow::Result<()> {
        Ok(())
    }
}

/// Whether JSON has a word for every number in it.
fn is_finite(column: &dyn Array) -> bool {
    match column.data_type() {
        DataType::Float32 => column.as_primitive::<Float32Type>().iter().flatten().all(f32::is_finite),
        DataType::Float64 => column.as_primitive::<Float64Type>().iter().flatten().all(f64::is_finite),
        DataType::Struct(_) => column.as_struct().columns().iter().all(|field| is_finite(field)),
        DataType::List(_) => {
            let lists = column.as_list::<i32>();
            lists.iter().flatten().all(|list| is_finite(&list))
        }
        DataType::LargeList(_) => {
            let lists = column.as_list::<i64>();
            lists.iter().flatten().all(|list| is_finite(&list))
        }
        DataType::FixedSizeList(..) => {
            let lists = column.as_fixed_size_list();
            lists.iter().flatten().all(|list| is_finite(&list))
        }
        DataType::Map(..) => is_finite(column.as_map().entries()),
        _ => true,
    }
}

/// Rows by whose cells the widths of columns are chosen.
const ROWS_AHEAD: usize = 1000;
/// Characters of a cell, at most.
const CELL: usize = 60;

/// For people: cells in columns, long ones cut short.
pub(super) struct Table {
    names: Vec<String>,
    /// Numbers stand on the right.
    is_number: Vec<bool>,
    /// `None` until rows were printed.
    widths: Option<Vec<usize>>,
    waiting: Vec<Vec<String>>,
    rows: u64,
    cut: u64,
}

impl Table {
    pub(super) fn new(schema: &Schema) -> Self {
        let names = schema.fields().iter().map(|field| visible(field.name())).collect();
        let is_number = schema.fields().iter().map(|field| field.data_type().is_numeric()).collect();
        Self { names, is_number, widths: None, waiting: vec![], rows: 0, cut: 0 }
    }

    fn print(&mut self, out: &mut dyn Write) -> anyhow::Result<()> {
        let rows = std::mem::take(&mut self.waiting);
        let mut head = None;
        let widths = self.widths.get_or_insert_with(|| {
            head = Some(&self.names);
            let widest = |column: usize| {
                let cells = rows.iter().map(|row| &row[column]).chain([&self.names[column]]);
                cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
            };
            (0..self.names.len()).map(widest).collect()
        });
        for row in head.into_iter().chain(&rows) {
            let cells = row.iter().zip(&*widths).zip(&self.is_number).map(|((cell, &width), is_number)| {
                if *is_number { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
            });
            writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
        }
        Ok(())
    }

    /// A plan is text of several lines.
    fn is_plan(&self) -> bool {
        self.names == ["plan_type", "plan"]
    }
}

impl Rows for Table {
    fn add(&mut self, out: &mut dyn Write, batch: &RecordBatch) -> anyhow::Result<()> {
        let format = FormatOptions::default().with_null("NULL").with_display_error(false);
        let columns = batch.columns().iter().map(|column| ArrayFormatter::try_new(column, &format));
        let columns = columns.collect::<Result<Vec<_>, _>>()?;
        for row in 0..batch.num_rows() {
            let cells = columns.iter().map(|column| column.value(row).try_to_string());
            let cells = cells.collect::<Result<Vec<_>, _>>()?;
            self.rows += 1;
            if self.is_plan() {
                writeln!(out, "{}", cells.join(":\n"))?;
                continue;
            }
            let short = cells.iter().map(|cell| {
                let (short, is_cut) = shortened(cell);
                self.cut += u64::from(is_cut);
                short
            });
            let short = short.collect();
            self.waiting.push(short);
            if self.waiting.len() >= ROWS_AHEAD {
                self.print(out)?;
            }
        }
        Ok(())
    }

    fn end(&mut self, out: &mut dyn Write) -> anyhow::Result<()> {
        if self.is_plan() {
            return Ok(());
        }
        if self.widths.is_none() || !self.waiting.is_empty() {
            self.print(out)?;
        }
        out.flush()?;
        let rows = count(self.rows, "row", "rows");
        match self.cut {
            0 => errln!("{rows}"),
            cut => {
                errln!("{rows}; {} cut short: --json has all of them", count(cut, "value is", "values are"))
            }
        }
        Ok(())
    }
}

/// Without what would break lines, or speak to the terminal.
fn visible(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}

/// What of a cell is shown, and whether that is not all.
fn shortened(cell: &str) -> (String, bool) {
    match cell.char_indices().nth(CELL) {
        None => (visible(cell), false),
        Some((end, _)) => (visible(&cell[..end]) + "…", true),
    }
}
