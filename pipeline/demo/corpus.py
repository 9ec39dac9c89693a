"""The words that the tiny tokenizer learns its merges from. Any other text falls back to shorter pieces and bytes."""

CORPUS = """
What colour is the left button? What colour is the right button? What color is the top button? What is its colour?
red green blue yellow orange purple black white grey gray pink brown cyan magenta violet dark light bright
red, green. Red. Green. Blue. Yellow. Orange. Purple. Black. White. The red one. The blue one is on the left.
Which button is on the left? Which button is on the right? Which word is on the red button? What does it say?
Click the red button. Click on the green button. Press the blue button. Tap the yellow button. Answer with the point.
Answer with the point (x, y). Answer with one word. Answer with yes or no. Answer with a number. Answer briefly.
Where is the button? Where should I click to open the menu? Where should I click to close the window? Point to it.
How many buttons are there? How many windows are open? How many words are written? How many colours do you see?
Is the left button red? Is the right button green? Yes. No. yes no true false none both neither maybe unknown
The user is asked to save the file. The user is asked to cancel the order. The button is labelled Save or Delete.
Save Cancel Open Close Delete Edit Copy Paste Undo Redo Help Send Next Back Home Menu Login Logout Submit Search Reset
save cancel open close delete edit copy paste undo redo help send next back home menu login logout submit search reset
Play Stop Pause Start Apply Print Share View Tools Window File Format Insert Options Settings Profile Account Password
play stop pause start apply print share view tools window file format insert options settings profile account password
left right top bottom middle centre center upper lower first second third last corner edge side row column above below
above the text below the image next to the title in the middle of the screen at the top of the page near the corner
one two three four five six seven eight nine ten zero hundred thousand half whole several many few some all each every
A screenshot of an application. An image of a document. A photo of a page. A picture of a table. A drawing of a chart.
The screen shows a window with two buttons, a title bar, a text field, a check box, a drop-down list and a scroll bar.
Describe the image. Describe the picture in detail. Describe what has changed. What is shown here? What is in the image?
Read the text in the image. Read the title of the document. What is written on the button? What is the title? Why?
This is a test. That was a test. These are tests. Those were tests. It is here. There it is. There are two.
You are a helpful assistant. You are given a screenshot and a question. You answer questions about images. Think first.
The assistant looks at the image, finds the element, and answers. First look, then think, then answer, and then check.
observation reasoning thought step stage plan action result answer conclusion finding diagnosis description summary
Observation: the window has two buttons. Reasoning: the left one is red. Action: click. Answer: the point is given.
The doctor looks at the endoscopy image. Is there a polyp? The polyp is small and flat. No polyp is seen in the colon.
What is the size of the polyp? What is the diagnosis? Is the mucosa normal? The finding is benign. Is there bleeding?
total amount price date name address number invoice order item quantity tax sum value percent unit page line section
What is the total amount of the invoice? What is the date? Who signed the document? The total is shown in the last row.
year month week day hour minute second today tomorrow yesterday Monday Tuesday Wednesday Thursday Friday morning evening
January February March April May June July August September October November December spring summer autumn winter
I we you he she it they me us him her them my our your his its their this that these those who whom whose which what
when where why how not only also very more most less least much other another same different new old good bad big small
large long short high low wide narrow round square circle triangle rectangle line arrow star heart dot cross shape icon
and or but if then else because so that while before after until since although with without within for from to of in on
at by as into onto over under between among through across along around about against during toward behind beside
be is are was were been being am do does did done doing have has had having can could will would shall should may might
must go goes went gone going get gets got make makes made take takes took taken see sees saw seen know knows knew known
say says said ask asks asked answer answers answered show shows showed shown find finds found use uses used work works
look looks looked want wants wanted give gives gave given think thinks thought come comes came turn turns turned
move moves moved write writes wrote written read reads draw draws drew drawn type types typed enter enters entered
select selects selected drag drop scroll swipe hover focus expand collapse switch toggle enable disable confirm accept
model image images vision language token tokens feature features cache train training data dataset sample batch question
person people man woman child dog cat bird horse car bus tree house road water sky cloud sun moon mountain river street
city country world room door table chair bed book paper pen phone camera computer keyboard mouse screen light lamp clock
"""
